"""The import order of docs/architecture.md, held by walking the source: nothing imports upwards, nothing in a circle,
and the sans-I/O core reads no clock, opens no socket and draws no unseeded randomness, directly or through what it
imports. The checker itself is tested on synthetic packages.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "tidegate"

# Low to high. A part may import what is on its own line or below.
LAYERS: tuple[frozenset[str], ...] = tuple(
    frozenset(line.split())
    for line in (
        "version",
        "request clock cost_model config",
        "metrics kv tenancy text usage",
        "scheduler admission",
        "executor models",
        "engine",
        "disagg",
        "worker",
        "routing",
        "gate",
        "api",
        "offline",
        "sim bench terminal",
        "cli __init__",
    )
)
CORE = frozenset(["request", "cost_model", "tenancy", "admission", "gate", "routing", "engine", "scheduler", "kv"])
# fmt: off
FORBIDDEN_IN_CORE = frozenset({
    "asyncio", "concurrent", "ctypes", "datetime", "fastapi", "gguf", "http", "httpx", "importlib", "multiprocessing",
    "openvino", "openvino_genai", "os", "queue", "requests", "rich", "secrets", "select", "selectors", "signal",
    "socket", "ssl", "starlette", "subprocess", "threading", "time", "tokenizers", "typer", "urllib", "uuid", "uvicorn",
    "zmq",
})
# fmt: on
# The one module that may read the time; the core takes its protocol and its simulated clock.
READS_THE_CLOCK = "clock"


@dataclass(frozen=True)
class Import:
    """`target` as written, absolute. Eager: runs when the module is imported, types apart."""

    target: str
    line: int
    eager: bool


def imports_of(tree: ast.Module) -> Iterator[Import]:
    def visit(node: ast.AST, eager: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(alias.name, child.lineno, eager)
            elif isinstance(child, ast.ImportFrom):
                module = "." * child.level + (child.module or "")
                yield Import(module, child.lineno, eager)
                # `from tidegate.kv import audit` names a module too; a name that is none resolves to its module.
                for alias in child.names:
                    yield Import(f"{module}.{alias.name}", child.lineno, eager)
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                for statement in child.body:
                    yield from visit(ast.Module([statement], []), False)
                for statement in child.orelse:
                    yield from visit(ast.Module([statement], []), eager)
            else:
                is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
                yield from visit(child, eager and not is_function)

    return visit(tree, True)


def unseeded_randomness(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Calls of `random` or `numpy.random` whose outcome no seed fixes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in ("random", "numpy.random"):
            yield node.lineno, f"imports names out of {node.module}; write random.Random(seed)"
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        is_random = name.startswith(("random.", "np.random.", "numpy.random."))
        is_generator = name.endswith((".Random", ".default_rng", ".Generator", ".SeedSequence", ".Philox", ".PCG64"))
        if is_random and not (is_generator and (node.args or node.keywords)):
            yield node.lineno, f"draws unseeded randomness: {name}"


class Graph:
    """The modules of one package, by dotted name, and what is wrong with their imports."""

    def __init__(self, root: Path) -> None:
        self.package = root.name
        self.trees: dict[str, ast.Module] = {}
        for path in sorted(root.rglob("*.py")):
            parts = (root.name, *path.relative_to(root).with_suffix("").parts)
            is_root = parts == (root.name, "__init__")
            name = ".".join(parts if parts[-1] != "__init__" else parts[:-1])
            self.trees[f"{name}.__init__" if is_root else name] = ast.parse(path.read_text(encoding="utf-8"))

    def part(self, module: str) -> str:
        """The top folder or file that a module belongs to."""
        return module.split(".")[1]

    def own_imports(self, module: str) -> list[tuple[str, Import]]:
        """(module of this package, import), each import resolved to the longest name that is a module."""
        found = []
        for item in imports_of(self.trees[module]):
            name = item.target
            if name == self.package:
                name = f"{self.package}.__init__"
            while name and name not in self.trees:
                name = name.rpartition(".")[0]
            if name and name != module:
                found.append((name, item))
        return found

    def external_imports(self, module: str) -> Iterator[Import]:
        for item in imports_of(self.trees[module]):
            if item.target.split(".")[0] not in (self.package, ""):
                yield item

    def unknown_parts(self) -> list[str]:
        known = frozenset().union(*LAYERS)
        return sorted({self.part(module) for module in self.trees} - known)

    def upward_imports(self) -> list[str]:
        """Every import counts here, also one inside a function or for types: a dependency is a dependency."""
        level = {part: height for height, parts in enumerate(LAYERS) for part in parts}
        return sorted(
            {
                f"{module}:{item.line} imports {target}"
                for module in self.trees
                for target, item in self.own_imports(module)
                if level.get(self.part(target), 0) > level.get(self.part(module), len(LAYERS))
            }
        )

    def relative_imports(self) -> list[str]:
        return sorted(
            f"{module}:{item.line}"
            for module, tree in self.trees.items()
            for item in imports_of(tree)
            if item.target.startswith(".")
        )

    def cycle(self) -> list[str]:
        """One circle of modules that import each other when imported, or nothing. Depth first."""
        edges = {module: {target for target, item in self.own_imports(module) if item.eager} for module in self.trees}
        done: set[str] = set()

        def search(module: str, path: list[str]) -> list[str]:
            if module in path:
                return [*path[path.index(module) :], module]
            if module in done:
                return []
            for target in sorted(edges[module]):
                # A package's __init__ runs before its modules; a module that names its package is no circle by that.
                if not module.startswith(f"{target}.") and (found := search(target, [*path, module])):
                    return found
            done.add(module)
            return []

        return next((found for module in sorted(self.trees) if (found := search(module, []))), [])

    def core_closure(self) -> list[str]:
        """The core's modules and all of this package that they import."""
        todo = [module for module in self.trees if self.part(module) in CORE]
        seen: set[str] = set()
        while todo:
            module = todo.pop()
            if module not in seen:
                seen.add(module)
                todo.extend(target for target, item in self.own_imports(module) if item.eager)
        return sorted(seen)

    def core_side_effects(self) -> list[str]:
        found = set()
        for module in self.core_closure():
            if self.part(module) == READS_THE_CLOCK:
                continue
            for item in self.external_imports(module):
                if item.target.split(".")[0] in FORBIDDEN_IN_CORE:
                    found.add(f"{module}:{item.line} imports {item.target.split('.')[0]}")
            if self.part(module) in CORE:
                found |= {f"{module}:{line} {what}" for line, what in unseeded_randomness(self.trees[module])}
        return sorted(found)


@pytest.fixture(scope="module")
def graph() -> Graph:
    return Graph(PACKAGE)


def test_every_part_has_its_place_in_the_order(graph: Graph) -> None:
    assert graph.unknown_parts() == [], "give it a line in LAYERS and in docs/architecture.md"


def test_nothing_imports_upwards(graph: Graph) -> None:
    assert graph.upward_imports() == []


def test_imports_are_absolute(graph: Graph) -> None:
    assert graph.relative_imports() == []


def test_no_modules_import_each_other_in_a_circle(graph: Graph) -> None:
    assert graph.cycle() == []


def test_the_core_has_no_side_effects(graph: Graph) -> None:
    assert graph.core_side_effects() == []


def test_the_core_is_not_empty(graph: Graph) -> None:
    assert {"tidegate.request", "tidegate.scheduler.step"} <= set(graph.core_closure())


# The checker.


def make_graph(root: Path, **files: str) -> Graph:
    """A package `tidegate` of these files; `kv__pool` is kv/pool.py."""
    for name, source in files.items():
        path = root / "tidegate" / Path(*name.split("__")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        (path.parent / "__init__.py").touch()
        path.write_text(source, encoding="utf-8")
    (root / "tidegate" / "__init__.py").touch()
    return Graph(root / "tidegate")


@pytest.mark.parametrize(
    "source",
    [
        "import tidegate.gate.gate",
        "from tidegate.gate import gate",
        "from tidegate.gate.gate import Gate",
        "def f():\n    from tidegate.gate.gate import Gate",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from tidegate.gate.gate import Gate",
        "import tidegate",
    ],
)
def test_the_checker_finds_an_upward_import(tmp_path: Path, source: str) -> None:
    graph = make_graph(tmp_path, kv__pool=source, gate__gate="class Gate: ...", api__server="import tidegate.gate.gate")
    upward = graph.upward_imports()
    assert upward and all(line.startswith("tidegate.kv.pool:") for line in upward)


@pytest.mark.parametrize("library", ["time", "asyncio", "zmq", "openvino", "threading", "http.client", "socket"])
@pytest.mark.parametrize("place", ["import {0}", "def f():\n    import {0}", "from {0} import x"])
def test_the_checker_finds_io_in_the_core(tmp_path: Path, library: str, place: str) -> None:
    graph = make_graph(tmp_path, kv__pool=place.format(library), api__server=place.format(library))
    assert [line.split(":")[0] for line in graph.core_side_effects()] == ["tidegate.kv.pool"]


def test_the_checker_finds_io_that_the_core_gets_through_another_part(tmp_path: Path) -> None:
    graph = make_graph(tmp_path, engine__engine="import tidegate.executor.fast", executor__fast="import openvino")
    assert graph.core_side_effects() == ["tidegate.executor.fast:1 imports openvino"]


@pytest.mark.parametrize(
    ("source", "is_fine"),
    [
        ("import random\nr = random.Random(3)", True),
        ("import random\nr = random.Random(x=3)", True),
        ("import numpy as np\nr = np.random.default_rng(3)", True),
        ("import random\nr = random.random()", False),
        ("import random\nr = random.Random()", False),
        ("from random import choice", False),
        ("import numpy as np\nr = np.random.default_rng()", False),
        ("import numpy as np\nr = np.random.rand(3)", False),
    ],
)
def test_the_checker_tells_seeded_from_unseeded_randomness(tmp_path: Path, source: str, is_fine: bool) -> None:
    assert (make_graph(tmp_path, gate__gate=source).core_side_effects() == []) is is_fine


def test_the_checker_finds_a_circle_but_not_a_lazy_one(tmp_path: Path) -> None:
    lazy = "def f():\n    import tidegate.kv.pool"
    assert make_graph(tmp_path / "a", kv__pool="import tidegate.kv.audit", kv__audit=lazy).cycle() == []
    circle = make_graph(tmp_path / "b", kv__pool="import tidegate.kv.audit", kv__audit="import tidegate.kv.pool")
    assert circle.cycle() == ["tidegate.kv.audit", "tidegate.kv.pool", "tidegate.kv.audit"]


def test_the_checker_finds_a_part_without_a_place_and_a_relative_import(tmp_path: Path) -> None:
    graph = make_graph(tmp_path, helpers__stuff="", kv__pool="from . import audit", kv__audit="")
    assert graph.unknown_parts() == ["helpers"]
    assert graph.relative_imports() == ["tidegate.kv.pool:1", "tidegate.kv.pool:1"]

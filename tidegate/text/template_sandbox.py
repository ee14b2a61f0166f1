"""A Jinja environment in which no template can run long or grow large.

Owns: the bounds of one render: its steps (loop rounds, calls, filters), the characters it builds, and its time.
Never gives a template files, attributes of Python's internals, or a way to change what it was given (Jinja's immutable
sandbox sees to these).

Every way to repeat or to grow is routed through the Budget:
    loops            the iterable of each `for` is wrapped when the template is parsed
    calls, macros    SandboxedEnvironment.call             `~`           rewritten to a filter when parsed
    + * ** %         intercepted binary operators          {{ }}            Environment.finalize
    filters          each one wrapped; as context filters they are never folded at compile time
    what a macro, a set block or the whole template put out: Environment.concat
Single operations are refused beforehand when their result could be large; so the clock, which is read every so many
steps, is read often enough.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import pass_context
from jinja2.visitor import NodeTransformer

MAX_STEPS = 1_000_000
MAX_CHARS_BUILT = 64 * 2**20
MAX_TIME_S = 2.0
_STEPS_BETWEEN_CLOCK_READS = 64
_MAX_ARGUMENT = 10_000  # widths, counts and indents that a filter or method may be given
_MAX_INTEGER_BITS = 4096
_REMOVED_FILTERS = ("center", "filesizeformat", "pprint", "random", "sum", "urlize", "wordwrap", "xmlattr")
_WIDE_FORMAT = re.compile(r"\d{5,}|%[^a-zA-Z%]*\*|\{[^{}]*\{")  # a width over 9,999, or one taken from an argument


class TemplateLimitError(RuntimeError):
    """A render went beyond its bounds."""


class Budget:
    """What one render may still do."""

    def __init__(self, max_steps: int, max_chars: int, max_time_s: float, now: Callable[[], float]) -> None:
        self._steps_left = max_steps
        self._chars_left = max_chars
        self._now = now
        self._deadline_s = now() + max_time_s

    def step(self) -> None:
        self._steps_left -= 1
        if self._steps_left < 0:
            raise TemplateLimitError("it takes too many steps")
        if self._steps_left % _STEPS_BETWEEN_CLOCK_READS == 0 and self._now() > self._deadline_s:
            raise TemplateLimitError("it takes too long")

    def build(self, num_chars: int) -> None:
        """Call before so many characters (or list items) are built."""
        self._chars_left -= num_chars
        if self._chars_left < 0:
            raise TemplateLimitError("it builds too much text")
        if num_chars >= 1000 and self._now() > self._deadline_s:
            raise TemplateLimitError("it takes too long")


_budget: ContextVar[Budget] = ContextVar("_budget")


def render_bounded(
    template: jinja2.Template,
    variables: dict[str, Any],
    *,
    max_steps: int = MAX_STEPS,
    max_chars: int = MAX_CHARS_BUILT,
    max_time_s: float = MAX_TIME_S,
    now: Callable[[], float] = time.monotonic,
) -> str:
    """Render a template of a BoundedEnvironment. Raises TemplateLimitError, or what the template itself raises."""
    token = _budget.set(Budget(max_steps, max_chars, max_time_s, now))
    try:
        return template.render(variables)
    finally:
        _budget.reset(token)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _GenerationTag],
            autoescape=False,
            finalize=_bounded_output,
        )
        self.globals.pop("lipsum")
        self.filters["tojson"] = _to_json
        for name in _REMOVED_FILTERS:
            del self.filters[name]
        self.filters = {name: _bounded_filter(name, filter_) for name, filter_ in self.filters.items()}
        self.filters["_bounded"] = _bounded_loop
        self.filters["_concat"] = _bounded_concat

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:
        """Where the output of the template, of a macro or of a block is joined."""
        budget = _budget.get(None)
        if budget is None:  # compiling
            return "".join(pieces)
        kept = []
        for piece in pieces:
            budget.build(len(piece) + 1)
            kept.append(piece)
        return "".join(kept)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Bounding().visit(super()._parse(source, name, filename))
        return tree

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = _budget.get()
        budget.step()
        if operator == "**":
            _check_power(left, right)
        elif operator == "%" and isinstance(left, str):
            _check_format(budget, left, right if isinstance(right, tuple) else (right,))
        elif isinstance(left, int) and isinstance(right, int):
            if left.bit_length() + right.bit_length() > _MAX_INTEGER_BITS:
                raise TemplateLimitError("it computes with huge numbers")
        elif operator == "*":
            budget.build(_size(left) * max(0, right) if isinstance(right, int) else _size(right) * max(0, left))
        else:
            budget.build(_size(left) + _size(right))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget = _budget.get()
        budget.step()
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, (str, bytes, int, list, tuple)):
            _check_method(budget, __obj.__name__, owner, args, kwargs)
        result = super().call(__context, __obj, *args, **kwargs)
        if not isinstance(__obj, Macro):  # what a macro returns was charged when it was joined
            budget.build(_size(result))
        return result

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def bounded(*args: Any, **kwargs: Any) -> str:
            _check_format(_budget.get(), value.__self__, (*args, *kwargs.values()))
            return wrapped(*args, **kwargs)

        return bounded


class _Bounding(NodeTransformer):
    """Routes loops and `~` through the budget."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, "_bounded", [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        pieces = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(pieces, "_concat", [], [], None, None, lineno=node.lineno)


class _GenerationTag(Extension):
    """`{% generation %}` marks what a model wrote, for training; here it only passes its body on."""

    tags = {"generation"}  # noqa: RUF012 (the base class's declaration)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@pass_context
def _bounded_output(context: Context, value: Any) -> str:
    text = str(value)
    _budget.get().build(len(text))
    return text


@pass_context
def _bounded_loop(context: Context, items: Iterable[Any]) -> Iterator[Any]:
    budget = _budget.get()
    for item in items:
        budget.step()
        yield item


@pass_context
def _bounded_concat(context: Context, pieces: list[Any]) -> str:
    return BoundedEnvironment.concat([str(piece) for piece in pieces])


def _bounded_filter(name: str, filter_: Callable[..., Any]) -> Callable[..., Any]:
    wanted = getattr(filter_, "jinja_pass_arg", None)
    kind = None if wanted is None else wanted.name

    @pass_context
    def bounded(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget = _budget.get()
        budget.step()
        given = (value, *args)
        if isinstance(value, (str, list, tuple)):
            _check_method(budget, name, value, args, kwargs)
        if kind == "context":
            given = (context, *given)
        elif kind == "eval_context":
            given = (context.eval_ctx, *given)
        elif kind == "environment":
            given = (context.environment, *given)
        result = filter_(*given, **kwargs)
        budget.build(_size(result))
        return result

    return bounded


def _check_method(budget: Budget, name: str, owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a method or filter, before it runs, whose result could be out of proportion to what it is given."""
    given = [*args, *kwargs.values()]
    if any(isinstance(argument, int) and abs(argument) > _MAX_ARGUMENT for argument in given):
        raise TemplateLimitError(f"it gives {name} too large a number")
    if name == "format" and isinstance(owner, str):
        _check_format(budget, owner, tuple(given))
    elif name == "replace" and isinstance(owner, str) and len(given) >= 2:
        old, new = given[0], given[1]
        num_places = owner.count(old) if isinstance(old, str) and old else len(owner) + 1
        budget.build(num_places * _size(new))
    elif name == "join":
        separator, items = (owner, given[0] if given else ()) if isinstance(owner, str) and given else ("", owner)
        if isinstance(items, (list, tuple, str, dict)):
            budget.build(sum(map(_size, items)) + len(items) * max([_size(separator), *map(_size, given)]))
    elif name == "indent" and isinstance(owner, str):
        widths = [argument if isinstance(argument, int) else _size(argument) for argument in given]
        budget.build((owner.count("\n") + 1) * max(widths, default=4))
    elif name in ("translate", "expandtabs") or isinstance(owner, bytes):
        raise TemplateLimitError(f"it uses {name}")


def _check_power(left: Any, right: Any) -> None:
    if not all(isinstance(number, (int, float)) for number in (left, right)) or abs(left) > 2**32 or abs(right) > 64:
        raise TemplateLimitError("it computes with huge numbers")


def _check_format(budget: Budget, text: str, args: tuple[Any, ...]) -> None:
    if _WIDE_FORMAT.search(text):
        raise TemplateLimitError("it formats to a width that is too large or computed")
    budget.build(max(text.count("%"), text.count("{")) * max(map(_size, args), default=0))


def _size(value: object) -> int:
    """Characters of a text, items of a list; other values are small."""
    return len(value) if isinstance(value, (str, bytes, list, tuple)) else 0


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: unlike Jinja's own filter, which escapes for HTML."""
    if not (indent is None or (isinstance(indent, int) and indent <= 16)) or max(map(len, separators or ("",))) > 16:
        raise TemplateLimitError("it spreads JSON too wide")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

"""What a figure was measured on: without it, a figure says nothing."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

from tidegate.version import __version__

_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16", "asimd")
_PACKAGES = ("openvino", "openvino-genai", "numpy")


def describe_machine() -> dict[str, object]:
    """CPU, cores that this process may use, memory, and versions. `load_1min` tells whether others were at work."""
    cpu = _cpu_fields()
    flags = set((cpu.get("flags") or cpu.get("Features") or "").split())
    return {
        "cpu": cpu.get("model name") or platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "extensions": [flag for flag in _FLAGS if flag in flags],
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_1min": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "tidegate": __version__,
        **{package: _version(package) for package in _PACKAGES},
    }


def machine_line(machine: dict[str, object]) -> str:
    extensions = machine["extensions"]
    assert isinstance(extensions, list)
    return (
        f"{machine['cpu']}, {machine['cores']} cores ({', '.join(extensions)}), {machine['memory_gib']} GiB, "
        f"load {machine['load_1min']}, openvino {machine['openvino']}"
    )


def _cpu_fields() -> dict[str, str]:
    """The first processor's entry."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return {}
    pairs = (line.partition(":") for line in text.partition("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"

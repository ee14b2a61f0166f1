"""tidegate: an OpenAI-compatible LLM server that keeps its latency promises when demand exceeds capacity.

    from tidegate import LLM, SamplingParams      # offline use, in this process: the same engine, no server

Importing the package is cheap: LLM, and all that computes, is loaded when it is first named.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tidegate.request import InvalidRequest, SamplingParams
from tidegate.version import __version__

if TYPE_CHECKING:
    from tidegate.offline import LLM

__all__ = ["LLM", "InvalidRequest", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from tidegate.offline import LLM

        return LLM
    raise AttributeError(f"module 'tidegate' has no attribute '{name}'")

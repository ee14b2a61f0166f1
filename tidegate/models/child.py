"""Runs as a process of its own, by file name: work whose memory, crashes and output must not be the caller's.

    python child.py module NAME ARGS...    like `python -m NAME ARGS...`
    python child.py convert FILE.gguf      write openvino_model.xml and .bin beside the file

It dies with its parent, however that ends, so that no download goes on behind a killed start.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(parent_pid: int, verb: str, arguments: list[str]) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        sys.exit(1)  # The parent ended before the line above.
    if verb == "module":
        sys.argv = arguments
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    elif verb == "convert":
        convert(arguments[0])
    else:
        sys.exit(f"unknown verb {verb}")


def convert(gguf_path: str) -> None:
    import openvino_genai

    openvino_genai.LLMPipeline(gguf_path, "CPU", enable_save_ov_model=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])

"""Runs as a process of its own, by file name: work whose memory, crashes and output must not be the caller's.

    python child.py PARENT_PID module NAME ARGS...     like `python -m NAME ARGS...`
    python child.py PARENT_PID convert FILE.gguf       write openvino_model.xml and .bin beside the file,
                    [--rope-factors F,F,...]           corrected where the reader is not true to the file

It dies with its parent, however that ends, so that no download goes on behind a killed start.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1


def main(parent_pid: int, verb: str, arguments: list[str]) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        sys.exit(1)  # The parent ended before the line above.
    if verb == "module":
        sys.argv = arguments
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    elif verb == "convert":
        # After all else, so that nothing of the folder above the package hides what is installed.
        sys.path.append(str(Path(__file__).resolve().parents[2]))
        factors = arguments[2].split(",") if arguments[1:2] == ["--rope-factors"] else []
        convert(Path(arguments[0]), [float(factor) for factor in factors])
    else:
        sys.exit(f"unknown verb {verb}")


def convert(path: Path, rope_factors: list[float]) -> None:
    import openvino
    import openvino_genai

    from tidegate.models.gguf_file import read_gguf
    from tidegate.models.minimums import restore_minimums

    openvino_genai.LLMPipeline(str(path), "CPU", enable_save_ov_model=True)
    xml = path.with_name("openvino_model.xml")
    model = openvino.Core().read_model(xml)
    if rope_factors:
        divide_rope_frequencies(model, rope_factors)
    if not restore_minimums(read_gguf(path), model) and not rope_factors:
        return
    # The weights of the model that was read are still mapped from the file that this one replaces.
    patched = path.with_name("patched.xml")
    openvino.save_model(model, patched, compress_to_fp16=False)
    patched.with_suffix(".bin").replace(xml.with_suffix(".bin"))
    patched.replace(xml)


def divide_rope_frequencies(model: Any, factors: list[float]) -> None:
    """The reader leaves out the tensor rope_freqs, by which Llama 3.1 and later stretch their context."""
    import numpy as np
    from openvino import opset13

    # The one constant that holds the inverse frequencies base^(-2i/d): it falls from 1, along the middle axis.
    found = [
        op
        for op in model.get_ops()
        if op.get_type_name() == "Constant" and list(op.shape) == [1, len(factors), 1] and op.data.flat[0] == 1.0
    ]
    if len(found) != 1:
        sys.exit(f"{len(found)} constants look like the rotary frequencies, not one")
    divided = (found[0].data / np.asarray(factors, np.float32).reshape(1, -1, 1)).astype(np.float32)
    constant = opset13.constant(divided)
    for target in found[0].output(0).get_target_inputs():
        target.replace_source_output(constant.output(0))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])

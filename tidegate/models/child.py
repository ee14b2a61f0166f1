"""Runs as a process of its own, by file name: work whose memory, crashes and output must not be the caller's.

    python child.py PARENT_PID module NAME ARGS...     like `python -m NAME ARGS...`
    python child.py PARENT_PID convert FILE.gguf       write openvino_model.xml and .bin beside the file;
                    [--rope-factors F,F,...]           each rotary frequency is divided by its factor

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
        if arguments[1:2] == ["--rope-factors"]:
            divide_rope_frequencies(
                os.path.dirname(arguments[0]), [float(factor) for factor in arguments[2].split(",")]
            )
    else:
        sys.exit(f"unknown verb {verb}")


def convert(gguf_path: str) -> None:
    import openvino_genai

    openvino_genai.LLMPipeline(gguf_path, "CPU", enable_save_ov_model=True)


def divide_rope_frequencies(folder: str, factors: list[float]) -> None:
    """The reader leaves out the tensor rope_freqs, by which Llama 3.1 and later stretch their context."""
    import numpy as np
    import openvino

    xml = os.path.join(folder, "openvino_model.xml")
    model = openvino.Core().read_model(xml)
    # The one constant that holds the inverse frequencies base^(-2i/d): it falls from 1, along the middle axis.
    found = [
        op
        for op in model.get_ops()
        if op.get_type_name() == "Constant" and list(op.shape) == [1, len(factors), 1] and op.data.flat[0] == 1.0
    ]
    if len(found) != 1:
        sys.exit(f"{len(found)} constants look like the rotary frequencies, not one")
    divided = (found[0].data / np.asarray(factors, np.float32).reshape(1, -1, 1)).astype(np.float32)
    constant = openvino.opset13.constant(divided)
    for target in found[0].output(0).get_target_inputs():
        target.replace_source_output(constant.output(0))
    # The weights of the model that was read are still mapped from the file that this one replaces.
    openvino.save_model(model, os.path.join(folder, "patched.xml"), compress_to_fp16=False)
    os.replace(os.path.join(folder, "patched.bin"), os.path.join(folder, "openvino_model.bin"))
    os.replace(os.path.join(folder, "patched.xml"), xml)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])

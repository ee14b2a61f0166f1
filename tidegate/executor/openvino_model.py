"""From an OpenVINO IR to a compiled model with paged KV inputs, and the precisions and settings it is compiled with.

Owns: the transformation of the graph and every CPU-plugin setting. Never does: run it.
The compiled model computes logits only for the rows named by its input `sample_rows`: projecting every token of a
prefill on the vocabulary would cost more than the rest of the step.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openvino as ov
import openvino.opset13 as ops
from openvino._offline_transformations import paged_attention_transformation

from tidegate.config import KvCacheDtype
from tidegate.executor.base import ExecutorError
from tidegate.executor.openvino_blocks import CacheTensor
from tidegate.executor.openvino_weights import widen_weights

SAMPLE_ROWS = "sample_rows"
_CACHE_PREFIXES = ("key_cache.", "value_cache.")
_QUANTIZATION_GROUP = 32  # activations of int8 products share a scale in groups of this many; 0 is off


@dataclass(frozen=True)
class Precision:
    """What is computed and stored in which type. Pairs other than these are refused by the plugin."""

    kv_cache_dtype: str
    compute_dtype: str
    quantization_group: int


@dataclass(frozen=True)
class PagedModel:
    compiled: ov.CompiledModel
    precision: Precision
    cache_tensors: tuple[CacheTensor, ...]
    block_size: int
    vocab_size: int


def choose_precision(kv_cache_dtype: KvCacheDtype, has_bf16: bool) -> Precision:
    """The precisions served. A CPU without bf16 computes in f32 instead, and then keeps f32 where bf16 was asked."""
    if kv_cache_dtype == "f32":
        return Precision("f32", "f32", 0)
    if has_bf16:
        return Precision(kv_cache_dtype, "bf16", _QUANTIZATION_GROUP)
    return Precision("u8" if kv_cache_dtype == "u8" else "f32", "f32", _QUANTIZATION_GROUP)


def compile_paged_model(ir_path: Path, kv_cache_dtype: KvCacheDtype, num_threads: int) -> PagedModel:
    """Read, transform and compile an IR. `num_threads` 0 takes all cores. Raises ExecutorError."""
    core = ov.Core()
    try:
        precision = choose_precision(kv_cache_dtype, "BF16" in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES"))
        model = core.read_model(ir_path)
        if precision.compute_dtype == "f32" and precision.quantization_group:
            widen_weights(model)
        paged_attention_transformation(model)
        _gather_before_projection(model)
        compiled = core.compile_model(model, "CPU", compile_settings(precision, num_threads))
    except RuntimeError as error:
        raise ExecutorError(f"cannot load the model {ir_path}: {_cause(error)}") from error
    cache_tensors = tuple(_cache_tensors(compiled))
    return PagedModel(
        compiled=compiled,
        precision=precision,
        cache_tensors=cache_tensors,
        block_size=next(t.block_shape[1] for t in cache_tensors if t.name.startswith("value_cache.")),
        vocab_size=compiled.output(0).partial_shape[2].get_length(),
    )


def compile_settings(precision: Precision, num_threads: int) -> dict[str, Any]:
    """What the CPU plugin is told. Public for comparisons, which must be run with the same."""
    return {
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": 1,
        "INFERENCE_NUM_THREADS": num_threads,
        # Pinned threads of a process wait for whoever else is on their core, and every process pins to the same cores.
        "ENABLE_CPU_PINNING": False,
        "INFERENCE_PRECISION_HINT": precision.compute_dtype,
        "KV_CACHE_PRECISION": precision.kv_cache_dtype,
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": precision.quantization_group,
    }


def _gather_before_projection(model: ov.Model) -> None:
    """Select the rows `sample_rows` of the last hidden state ahead of the product with the vocabulary matrix."""
    node = model.get_results()[0].input_value(0).get_node()
    while node.get_type_name() != "MatMul":
        if node.get_input_size() == 0:
            raise ExecutorError("this model has no projection on the vocabulary at its end")
        node = node.input_value(0).get_node()
    rows = ops.parameter([-1], ov.Type.i64, name=SAMPLE_ROWS)
    rows.output(0).set_names({SAMPLE_ROWS})
    gathered = ops.gather(node.input_value(0), rows, ops.constant(0, dtype=ov.Type.i64))
    node.input(0).replace_source_output(gathered.output(0))
    model.add_parameters([rows])
    model.validate_nodes_and_infer_types()


def _cache_tensors(compiled: ov.CompiledModel) -> list[CacheTensor]:
    """The cache inputs of the model; their first dimension is the number of blocks, which is ours to choose."""
    return [
        CacheTensor(
            name=port.any_name,
            block_shape=tuple(dimension.get_length() for dimension in list(port.partial_shape)[1:]),
            element_type=port.element_type,
        )
        for port in compiled.inputs
        if port.any_name.startswith(_CACHE_PREFIXES)
    ]


def _cause(error: Exception) -> str:
    """The last line of a library's exception says what is wrong; those before it say where in its source."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__

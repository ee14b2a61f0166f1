"""GGUF files of another precision, made from one that there is: what is compared needs to differ in nothing else.

Owns: dequantizing a file's matrices and writing them as F16 or Q8_0, metadata and all else as they were. A made file
holds no more than the first one did: from a 4-bit file, F16 shows what reading it costs, not what quantizing it cost.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from tidegate.models import cache

WeightType = Literal["F16", "Q8_0"]


def made_file(source: Path, name: str, weight_type: WeightType) -> Path:
    """The file made from `source`, kept in the cache folder. Raises ModelError when the disk is full."""
    target = cache.cache_dir() / "bench" / f"{name}.{weight_type}.gguf"
    key = f"bench-{target.stem}"
    with cache.disk_errors(f"cannot write {target}"), cache.locked(key):
        if not target.is_file():
            with cache.work_dir(key) as work:
                made = work / target.name
                _write(source, made, weight_type)
                cache.publish(made, target)
    return target


def _write(source: Path, target: Path, weight_type: WeightType) -> None:
    import gguf

    reader = gguf.GGUFReader(source)
    architecture = str(reader.fields["general.architecture"].contents())
    writer = gguf.GGUFWriter(target, architecture)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        kind = field.types[0]
        item_kind = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, sub_type=item_kind)
    quantization = gguf.GGMLQuantizationType[weight_type]
    for tensor in reader.tensors:
        if len(tensor.shape) == 1:
            writer.add_tensor(tensor.name, tensor.data)
            continue
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, gguf.quants.quantize(values, quantization), raw_dtype=quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

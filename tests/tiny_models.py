"""Tiny random-weight GGUF files that openvino_genai can really read: real loading and real steps in milliseconds.

Owns: the shapes, weights and vocabulary of test models. The same arguments always give the same bytes.
Never does: quality. The weights are random, so the text is noise; what matters is that logits differ between tokens.
The vocabulary is byte-level BPE: 3 special tokens (ids 0-2, as in SmolLM2), the 256 bytes, and a few English merges.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np

Family = Literal["llama", "qwen2", "qwen3"]
WeightType = Literal["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K"]

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
BOS_ID, EOS_ID = 1, 2
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_MERGES = (
    "Ġ t", "h e", "i n", "Ġt he", "e r", "o n", "Ġ a", "r e", "a n", "Ġ s", "o r", "a t", "e n", "Ġ w", "o u",
    "i s", "e s", "Ġ o", "i t", "Ġ c", "a l", "in g", "Ġ b", "an d", "Ġa nd", "Ġ p", "Ġo f", "Ġ h", "Ġ m", "Ġ d",
    "l l", "Ġt o", "s t", "u s", "e r s", "s y", "us er", "l o", "h i", "ou r", "Ġi n", "Ġ i", "a r", "Ġw or",
    "l d", "Ġwor ld", "he ll",
)  # fmt: skip
_PRE = {"llama": "smollm", "qwen2": "qwen2", "qwen3": "qwen2"}
_FILE_TYPE = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q4_K": 14, "BF16": 32}


def tiny_vocabulary() -> tuple[list[str], list[int], list[str]]:
    """Tokens, their GGUF types (3 = control, 1 = normal), and the merges."""
    tokens = [*SPECIAL_TOKENS, *_byte_letters()]
    merges: list[str] = []
    for merge in _MERGES:
        left, _, right = merge.partition(" ")
        if left in tokens and right in tokens and left + right not in tokens:
            tokens.append(left + right)
            merges.append(merge)
    types = [3] * len(SPECIAL_TOKENS) + [1] * (len(tokens) - len(SPECIAL_TOKENS))
    return tokens, types, merges


def write_tiny_gguf(
    path: Path,
    family: Family = "llama",
    *,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_size: int = 32,
    hidden_size: int | None = None,
    ffn_size: int = 256,
    context_length: int = 512,
    weight_type: WeightType = "Q8_0",
    tied_embeddings: bool = False,
    chat_template: str | None = CHAT_TEMPLATE,
    architecture: str | None = None,
    rope_factors: tuple[float, ...] = (),
    seed: int = 0,
) -> Path:
    """Write a model file of a few hundred KB to `path`, and return it.

    num_kv_heads < num_heads is grouped-query attention, 1 is multi-query, equal is plain multi-head. hidden_size is
    num_heads * head_size unless given (only qwen3 may differ). `architecture` writes another name into the metadata
    (to see it refused). `rope_factors` (head_size / 2 of them) divide the rotary frequencies, as in Llama 3.1.
    Norms and biases are always F32. Q4_K needs sizes that are multiples of 256.
    """
    hidden = hidden_size or num_heads * head_size
    tokens, token_types, merges = tiny_vocabulary()
    writer = gguf.GGUFWriter(str(path), architecture or family)
    writer.add_name(f"tiny {family}")
    writer.add_file_type(_FILE_TYPE[weight_type])
    writer.add_block_count(num_layers)
    writer.add_context_length(context_length)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(ffn_size)
    writer.add_head_count(num_heads)
    writer.add_head_count_kv(num_kv_heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_rope_dimension_count(head_size)
    if family == "qwen3":
        writer.add_key_length(head_size)
        writer.add_value_length(head_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_PRE[family])
    writer.add_token_list(tokens)
    writer.add_token_types(token_types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(BOS_ID)
    writer.add_eos_token_id(EOS_ID)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(EOS_ID)
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    shapes = _tensor_shapes(
        family, len(tokens), num_layers, hidden, num_heads * head_size, num_kv_heads * head_size, head_size, ffn_size
    )
    if tied_embeddings:
        del shapes["output.weight"]
    if rope_factors:
        writer.add_tensor("rope_freqs.weight", np.asarray(rope_factors, np.float32))
    _add_tensors(writer, shapes, weight_type, seed)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tensor_shapes(
    family: Family, vocab: int, num_layers: int, hidden: int, q_size: int, kv_size: int, head_size: int, ffn: int
) -> dict[str, tuple[int, ...]]:
    """Name to shape, rows first (the reverse of GGUF's own order)."""
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocab, hidden)}
    for layer in range(num_layers):
        block: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (hidden,),
            "attn_q.weight": (q_size, hidden),
            "attn_k.weight": (kv_size, hidden),
            "attn_v.weight": (kv_size, hidden),
            "attn_output.weight": (hidden, q_size),
            "ffn_norm.weight": (hidden,),
            "ffn_gate.weight": (ffn, hidden),
            "ffn_up.weight": (ffn, hidden),
            "ffn_down.weight": (hidden, ffn),
        }
        if family == "qwen2":
            block |= {"attn_q.bias": (q_size,), "attn_k.bias": (kv_size,), "attn_v.bias": (kv_size,)}
        if family == "qwen3":
            block |= {"attn_q_norm.weight": (head_size,), "attn_k_norm.weight": (head_size,)}
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in block.items()}
    return shapes | {"output_norm.weight": (hidden,), "output.weight": (vocab, hidden)}


def _add_tensors(writer: Any, shapes: dict[str, tuple[int, ...]], weight_type: WeightType, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for name, shape in shapes.items():
        if len(shape) == 1:
            center = 0.0 if name.endswith(".bias") else 1.0
            writer.add_tensor(name, (center + 0.1 * rng.standard_normal(shape)).astype(np.float32))
            continue
        # A matrix keeps the scale of what it multiplies; embeddings have unit scale, so that attention matters.
        scale = 1.0 if name == "token_embd.weight" else 2.0 / np.sqrt(shape[1])
        weights = (scale * rng.standard_normal(shape)).astype(np.float32)
        quantization = gguf.GGMLQuantizationType[weight_type]
        if weight_type in ("F32", "F16"):
            writer.add_tensor(name, weights.astype(np.float32 if weight_type == "F32" else np.float16))
        elif weight_type == "Q4_K":
            writer.add_tensor(name, _random_q4_k(rng, shape, scale), raw_dtype=quantization)
        else:
            writer.add_tensor(name, gguf.quants.quantize(weights, quantization), raw_dtype=quantization)


def _random_q4_k(rng: np.random.Generator, shape: tuple[int, ...], scale: float) -> np.ndarray:
    """Super-blocks of random bits, since `gguf` reads Q4_K but does not write it: about even, of about that scale."""
    rows, columns = shape
    blocks = rng.integers(0, 256, (rows, columns // 256, 144), dtype=np.uint8)
    units = np.array([scale / 190, 7.5 * scale / 190], np.float16)  # of scales, and of minimums
    blocks[..., 0:4] = units.view(np.uint8)
    return blocks.reshape(rows, -1)


def _byte_letters() -> list[str]:
    """The printable letter that byte-level BPE writes for each byte value, in byte order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]

"""From a model's files to one description of its tokenizer: TokenizerSpec.

Owns: reading GGUF metadata, or a folder's tokenizer.json and tokenizer_config.json, into the tokenizer.json form that
the `tokenizers` library loads, plus what that form lacks (end-of-sequence ids, chat template).
Never encodes. What it cannot represent exactly is refused with a ConfigError, never approximated.

Pre-tokenizers are regular expressions named by `tokenizer.ggml.pre`; the families are those of llama.cpp's vocabulary.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidegate.config import ConfigError
from tidegate.text.gguf_metadata import read_gguf_metadata

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")

_PRE_TOKENIZERS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("default", "gpt-2", "gpt2", "mpt", "olmo", "jais", "phi-2"), (_GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), (_DIGIT, _GPT2)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "dbrx", "smaug-bpe"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "stablelm2", "deepseek-r1-qwen", "megrez", "hunyuan"), (_QWEN2,)),
}
_WHOLE_WORD_FIRST = frozenset({"llama-bpe", "llama3", "llama-v3"})  # a word that is in the vocabulary is not merged
_BOS_BY_DEFAULT = _WHOLE_WORD_FIRST
_NFC = frozenset({"qwen2"})  # their reference tokenizers normalize; GGUF has no key for it

_CONTROL, _USER_DEFINED, _UNKNOWN, _BYTE = 3, 4, 2, 6


@dataclass(frozen=True)
class TokenizerSpec:
    """`model` is a tokenizer.json document. `eos_ids` end a generation; the first is the end-of-sequence token."""

    model: dict[str, Any]
    bos_id: int | None
    eos_ids: tuple[int, ...]
    chat_template: str | None


def spec_from_gguf(path: Path) -> TokenizerSpec:
    """Raises ConfigError when the file has no tokenizer, or one of a kind that is not supported."""
    return spec_from_metadata(read_gguf_metadata(path), source=str(path))


def spec_from_metadata(metadata: dict[str, Any], *, source: str) -> TokenizerSpec:
    """The tokenizer in GGUF metadata that is already read. `source` is for error messages."""
    kind = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise ConfigError(f"{source} holds no tokenizer; serve a model file that has one")
    tokens = _distinct(tokens)
    types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(types) != len(tokens):
        raise ConfigError(f"{source} has {len(tokens)} tokens but {len(types)} token types; fetch it again")
    bos_id = _token_id(metadata, "bos", len(tokens))
    if kind == "gpt2":
        model, add_bos = _byte_level(metadata, tokens, source)
    elif kind == "llama":
        model, add_bos = _sentencepiece(metadata, tokens, types, source)
    else:
        raise ConfigError(f"{source} has a tokenizer of kind {kind!r}; supported are gpt2 and llama")
    model["added_tokens"] = [
        _added_token(token_id, tokens[token_id], special=types[token_id] != _USER_DEFINED)
        for token_id in range(len(tokens))
        if types[token_id] in (_CONTROL, _USER_DEFINED) or (types[token_id] == _UNKNOWN and kind == "llama")
    ]
    if metadata.get("tokenizer.ggml.add_bos_token", add_bos) and bos_id is not None:
        model["post_processor"] = _bos_processor(tokens[bos_id], bos_id)
    eos_ids = [_token_id(metadata, name, len(tokens)) for name in ("eos", "eot")]
    template = metadata.get("tokenizer.chat_template")
    return TokenizerSpec(
        model=model,
        bos_id=bos_id,
        eos_ids=tuple(dict.fromkeys(token_id for token_id in eos_ids if token_id is not None)),
        chat_template=template if isinstance(template, str) else None,
    )


def spec_from_folder(folder: Path) -> TokenizerSpec:
    """Read tokenizer.json, with tokenizer_config.json, chat_template.jinja and generation_config.json where present.

    Raises ConfigError when tokenizer.json is missing or not readable.
    """
    model = _read_json(folder / "tokenizer.json")
    if not model:
        raise ConfigError(f"{folder} has no tokenizer.json; a model folder needs one")
    settings = _read_json(folder / "tokenizer_config.json")
    ids = {added["content"]: added["id"] for added in model.get("added_tokens", [])}
    bos_id = ids.get(_token_text(settings.get("bos_token")))
    eos_ids = [ids[text] for text in [_token_text(settings.get("eos_token"))] if text in ids]
    generation_eos = _read_json(folder / "generation_config.json").get("eos_token_id", [])
    eos_ids += generation_eos if isinstance(generation_eos, list) else [generation_eos]
    template = settings.get("chat_template")
    if isinstance(template, list):  # several named templates
        template = next((entry["template"] for entry in template if entry.get("name") == "default"), None)
    jinja = folder / "chat_template.jinja"
    if jinja.is_file():
        template = jinja.read_text(encoding="utf-8")
    return TokenizerSpec(model, bos_id, tuple(dict.fromkeys(eos_ids)), template)


def _byte_level(metadata: dict[str, Any], tokens: list[str], source: str) -> tuple[dict[str, Any], bool]:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in _PRE_TOKENIZERS:
        raise ConfigError(f"{source} needs the pre-tokenizer {pre!r}; known are: {', '.join(sorted(_PRE_TOKENIZERS))}")
    splits = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in _PRE_TOKENIZERS[pre]
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    model = _document(
        tokens,
        [merge.split(" ", 1) for merge in metadata.get("tokenizer.ggml.merges", [])],
        ignore_merges=pre in _WHOLE_WORD_FIRST,
    )
    model["normalizer"] = {"type": "NFC"} if pre in _NFC else None
    model["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [*splits, byte_level]}
    model["decoder"] = byte_level
    return model, pre in _BOS_BY_DEFAULT


def _sentencepiece(
    metadata: dict[str, Any], tokens: list[str], types: list[int], source: str
) -> tuple[dict[str, Any], bool]:
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise ConfigError(f"{source} has a llama tokenizer without one score a token; fetch it again")
    unknown_id = _token_id(metadata, "unknown", len(tokens))
    model = _document(
        tokens,
        _merges_from_scores(tokens, scores, types),
        byte_fallback=True,
        fuse_unk=True,
        unk_token=None if unknown_id is None else tokens[unknown_id],
    )
    underscores = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        prepend = {"type": "Prepend", "prepend": "\u2581"}
        model["normalizer"] = {"type": "Sequence", "normalizers": [prepend, underscores]}
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    else:
        model["normalizer"] = underscores
    model["decoder"] = {"type": "Sequence", "decoders": decoders}
    return model, True


def _merges_from_scores(tokens: list[str], scores: list[float], types: list[int]) -> list[list[str]]:
    """The merges that build each piece, best score first: SentencePiece's order of merging."""
    ids = {token: token_id for token_id, token in enumerate(tokens) if types[token_id] not in (_CONTROL, _BYTE)}
    ranked = []
    for piece, token_id in ids.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in ids and right in ids:
                ranked.append((-scores[token_id], ids[left], ids[right], left, right))
    ranked.sort()
    return [[left, right] for _, _, _, left, right in ranked]


def _document(tokens: list[str], merges: list[list[str]], **model: Any) -> dict[str, Any]:
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": merges, **model},
    }


def _distinct(tokens: list[str]) -> list[str]:
    """Give repeated token texts (padding entries of some files) names of their own, so that every id exists."""
    seen: set[str] = set()
    distinct = []
    for token_id, token in enumerate(tokens):
        name = f"<repeated {token_id}>" if token in seen else token
        seen.add(name)
        distinct.append(name)
    return distinct


def _added_token(token_id: int, text: str, *, special: bool) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": special}
    return {"id": token_id, "content": text, **flags}


def _bos_processor(text: str, token_id: int) -> dict[str, Any]:
    bos, first, second = ({"SpecialToken": {"id": text, "type_id": 0}}, _sequence("A", 0), _sequence("B", 1))
    return {
        "type": "TemplateProcessing",
        "single": [bos, first],
        "pair": [bos, first, bos, second],
        "special_tokens": {text: {"id": text, "ids": [token_id], "tokens": [text]}},
    }


def _sequence(name: str, type_id: int) -> dict[str, Any]:
    return {"Sequence": {"id": name, "type_id": type_id}}


def _token_id(metadata: dict[str, Any], name: str, num_tokens: int) -> int | None:
    token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
    return token_id if isinstance(token_id, int) and 0 <= token_id < num_tokens else None


def _token_text(entry: object) -> str:
    """A token in tokenizer_config.json is a string or an object with its content."""
    content = entry.get("content") if isinstance(entry, dict) else entry
    return content if isinstance(content, str) else ""


def _read_json(path: Path) -> dict[str, Any]:
    """The object in the file, empty when there is no file. Raises ConfigError when it is not JSON."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    return content

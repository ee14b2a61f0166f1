"""`tidegate bench quality`: what KV and weight precisions cost in quality, and save in memory and time.

Perplexity of a fixed public-domain text (data/README.md), in windows, through the engine itself: each window is a
prompt whose tokens' log-probabilities are asked for. It is computed in short chunks, so that most of what a token
attends to has been written to the KV cache and read back in its precision, as it is when an answer is generated.

Beside it stand the size of the KV cache a token, that of the weights as served, and the speed of a decode step.
Weight formats are made from the model's own file (weight_files.py): from a 4-bit file that shows what each way of
*serving* those weights costs, not what quantizing the original model cost.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import get_args

from tidegate.bench.machine import describe_machine, machine_line
from tidegate.bench.report import check_writable, console_for, plain_table, write_json
from tidegate.bench.weight_files import made_file
from tidegate.clock import RealClock
from tidegate.config import ConfigError, KvCacheDtype
from tidegate.models.load import resolve_model
from tidegate.models.source import ModelSource
from tidegate.offline import LLM
from tidegate.request import SamplingParams

WINDOW_TOKENS = 1024
CHUNK_TOKENS = 64
_DECODED_TOKENS = 64
_NUM_TIMINGS = 3


@dataclass(frozen=True, slots=True)
class Quality:
    """`weight_mib`: of the weights as they are served. `decode_ms`: a token of a lone answer, median."""

    weights: str
    kv_cache_dtype: str
    perplexity: float
    num_tokens: int
    weight_mib: float
    kv_bytes_per_token: int
    decode_ms: float


def run(json_path: str | None = None, model: str = "smollm2-135m") -> int:
    """Returns the exit code. Raises ConfigError when the model is no GGUF file."""
    check_writable(json_path)
    console = console_for(json_path)
    machine = describe_machine()
    console.print(machine_line(machine), soft_wrap=True)
    rows = []
    for label, spec, source in _weight_files(model):
        for kv_cache_dtype in get_args(KvCacheDtype):
            with console.status(f"{label}, KV {kv_cache_dtype}"):
                rows.append(measure(label, spec, source, kv_cache_dtype))
    least = min(row.perplexity for row in rows)
    console.print(
        plain_table(
            f"Perplexity over {rows[0].num_tokens:,} tokens of public-domain text",
            ("weights", "KV", "perplexity", "over the least", "weights MiB", "KV bytes a token", "decode ms"),
            [
                (
                    row.weights,
                    row.kv_cache_dtype,
                    f"{row.perplexity:.3f}",
                    f"{row.perplexity / least - 1:+.2%}",
                    f"{row.weight_mib:.0f}",
                    f"{row.kv_bytes_per_token:,}",
                    f"{row.decode_ms:.1f}",
                )
                for row in rows
            ],
        )
    )
    write_json({"rows": [asdict(row) for row in rows], "machine": machine}, json_path)
    return 0


def _weight_files(model: str) -> Iterator[tuple[str, str, ModelSource]]:
    """The model's own file, then what is made of it: label, what --model takes, and its source."""
    own = resolve_model(model)
    if own.tokenizer.kind != "gguf":
        raise ConfigError(f"{model} is no GGUF file; other precisions can be made from a GGUF file only")
    yield own.weight_format, model, own
    for weight_type in ("Q8_0", "F16"):
        path = made_file(Path(own.tokenizer.path), f"{own.name}-{own.weight_digest[:12]}", weight_type)
        yield f"{weight_type} made of it", str(path), resolve_model(str(path))


def measure(label: str, spec: str, source: ModelSource, kv_cache_dtype: KvCacheDtype) -> Quality:
    settings = {"kv_cache_dtype": kv_cache_dtype, "kv_memory": 2**28, "enable_prefix_caching": False}
    with LLM(spec, progress=False, max_num_batched_tokens=CHUNK_TOKENS, **settings) as llm:
        log_likelihood, num_tokens = _log_likelihood(llm)
        info = llm.info
        quality = Quality(
            weights=label,
            kv_cache_dtype=kv_cache_dtype,
            perplexity=math.exp(-log_likelihood / num_tokens),
            num_tokens=num_tokens,
            weight_mib=source.ir_path.with_suffix(".bin").stat().st_size / 2**20,
            kv_bytes_per_token=info.bytes_per_block // info.block_size,
            decode_ms=median(_decode_ms(llm) for _ in range(_NUM_TIMINGS)),
        )
    del llm
    gc.collect()
    return quality


def _log_likelihood(llm: LLM) -> tuple[float, int]:
    """Sum of the log-probabilities of all tokens but the first of each window, and how many these are."""
    text = files("tidegate.bench").joinpath("data/perplexity.txt").read_text(encoding="utf-8")
    token_ids = llm.tokenizer.encode(text)
    size = min(WINDOW_TOKENS, llm.max_model_len - 1)
    windows = [token_ids[start : start + size] for start in range(0, len(token_ids), size)]
    outputs = llm.generate(windows, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0))
    logprobs = [entry.logprob for output in outputs for entry in (output.prompt_logprobs or ()) if entry is not None]
    return sum(logprobs), len(logprobs)


def _decode_ms(llm: LLM) -> float:
    """Milliseconds a decode step of one short answer takes, the prompt's own step left out."""
    clock = RealClock()
    times = []
    for max_tokens in (1, 1 + _DECODED_TOKENS):
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        start_s = clock.now()
        llm.generate([[1, 2, 3, 4, 5, 6, 7, 8]], params)
        times.append(clock.now() - start_s)
    return (times[1] - times[0]) / _DECODED_TOKENS * 1e3

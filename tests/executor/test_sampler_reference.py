"""The sampler against a slow one that is written straight from the definitions, for every parameter at once."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest

from tidegate.executor.sampler import Sampler
from tidegate.request import SamplingParams
from tidegate.scheduler.step import SampleSpec

MASK = 2**64 - 1
STEP = 0x9E3779B97F4A7C15
# One short group line, ragged lines, one chunk, one chunk and a ragged one, the default model's three chunks.
VOCAB_SIZES = (5, 700, 16384, 20003, 49152)


def mix(word: int) -> int:
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & MASK
    return word ^ (word >> 31)


def exponential(word: int) -> float:
    return -math.log1p(-((word >> 12) + 0.5) * 2.0**-52)


def slow_noise(seed: int, position: int, token_id: int) -> float:
    key = mix((mix((seed + STEP) & MASK) + position * STEP) & MASK)
    group = token_id // 16384 * 512 + token_id % 512
    group_word = mix((key + group * STEP) & MASK)
    least = exponential(group_word) / 32
    if group_word % 32 == token_id // 512 % 32:
        return -math.log(least)
    token_key = mix(key ^ 0xD1B54A32D192ED03)
    return -math.log(least + exponential(mix((token_key + token_id * STEP) & MASK)))


def slow_kept(logits: npt.NDArray[np.float64], params: SamplingParams) -> npt.NDArray[np.bool_]:
    """The tokens that min_p, top_k and top_p keep."""
    with np.errstate(over="ignore"):
        probs = np.exp((logits - logits.max()) / params.temperature)
    kept = probs >= params.min_p * probs.max()
    kept &= logits > -np.inf
    if 0 < params.top_k < logits.size:
        kept &= logits >= np.sort(logits)[-params.top_k]
    total = probs[kept].sum()
    order = [int(i) for i in np.argsort(-logits, kind="stable") if kept[i]]
    mass, bar = 0.0, -np.inf
    for token_id in order:
        bar = logits[token_id]
        mass += probs[token_id] / total
        if params.top_p < 1.0 and mass >= params.top_p:
            break
    return kept & (logits >= bar)


def slow_edits(logits: npt.NDArray[np.float64], spec: SampleSpec) -> npt.NDArray[np.float64]:
    params, counts = spec.params, spec.output_counts or {}
    edited = logits.copy()
    for token_id in {*counts, *(spec.prompt_token_ids or [])}:
        factor = params.repetition_penalty
        edited[token_id] = edited[token_id] / factor if edited[token_id] > 0 else edited[token_id] * factor
    for token_id, count in counts.items():
        edited[token_id] -= count * params.frequency_penalty + params.presence_penalty
    for token_id, bias in (params.logit_bias or {}).items():
        edited[token_id] += bias
    for token_id in range(edited.size):
        if params.allowed_token_ids is not None and token_id not in params.allowed_token_ids:
            edited[token_id] = -np.inf
    for token_id in spec.banned_token_ids:
        edited[token_id] = -np.inf
    return edited


def slow_sample(logits: npt.NDArray[np.float32], spec: SampleSpec) -> int:
    edited = slow_edits(logits.astype(np.float64), spec)
    if spec.params.temperature == 0.0:
        return int(edited.argmax())
    kept_ids = np.flatnonzero(slow_kept(edited, spec.params)).tolist()
    return int(
        max(
            kept_ids,
            key=lambda i: edited[i] + spec.params.temperature * slow_noise(spec.seed, spec.position, i),
        )
    )


def model_like_logits(rng: np.random.Generator, num_rows: int, vocab_size: int) -> npt.NDArray[np.float32]:
    """From flat to very peaked rows."""
    spread = rng.uniform(0.0, 5.0, size=(num_rows, 1))
    return (rng.standard_normal((num_rows, vocab_size)) * spread + rng.uniform(-20, 20)).astype(np.float32)


FILTERS = {
    "plain": SamplingParams(),
    "cold": SamplingParams(temperature=0.3),
    "hot": SamplingParams(temperature=2.0),
    "top_k": SamplingParams(top_k=20),
    "top_k of one half": SamplingParams(top_k=10_000),
    "top_p": SamplingParams(top_p=0.9),
    "narrow top_p": SamplingParams(top_p=0.05),
    "hot top_p": SamplingParams(temperature=2.0, top_p=0.6),
    "min_p": SamplingParams(min_p=0.1),
    "all": SamplingParams(temperature=1.3, top_p=0.8, top_k=40, min_p=0.01),
}


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
@pytest.mark.parametrize("params", FILTERS.values(), ids=FILTERS.keys())
def test_draws_what_the_slow_reference_draws(params: SamplingParams, vocab_size: int) -> None:
    num_rows = 20 if vocab_size < 10_000 else 3
    rng = np.random.default_rng(vocab_size)
    logits = model_like_logits(rng, num_rows, vocab_size)
    specs = [SampleSpec(0, int(rng.integers(2**62)), int(rng.integers(4096)), params) for _ in range(num_rows)]
    expected = [slow_sample(row, spec) for row, spec in zip(logits, specs, strict=True)]
    assert Sampler(vocab_size).sample(logits, specs) == (expected, None)


def test_draws_what_the_slow_reference_draws_with_edits() -> None:
    vocab_size, rng = 700, np.random.default_rng(5)
    sampler = Sampler(vocab_size)
    logits = model_like_logits(rng, 60, vocab_size)
    specs = []
    for index in range(60):
        params = SamplingParams(
            temperature=(0.0, 0.8)[index % 2],
            top_p=float(rng.uniform(0.3, 1.0)),
            repetition_penalty=float(rng.uniform(0.5, 2.0)),
            presence_penalty=float(rng.uniform(-2, 2)),
            frequency_penalty=float(rng.uniform(-2, 2)),
            logit_bias={int(i): float(rng.uniform(-9, 9)) for i in rng.integers(vocab_size, size=5)},
            allowed_token_ids=None if index % 3 else tuple(rng.integers(vocab_size, size=50).tolist()),
        )
        spec = SampleSpec(0, index, index * 7, params)
        spec.output_counts = {int(i): int(rng.integers(1, 5)) for i in rng.integers(vocab_size, size=30)}
        spec.prompt_token_ids = rng.integers(vocab_size, size=100).tolist()
        spec.banned_token_ids = tuple(rng.integers(vocab_size, size=3).tolist())
        specs.append(spec)
    expected = [slow_sample(row, spec) for row, spec in zip(logits, specs, strict=True)]
    assert sampler.sample(logits, specs)[0] == expected
    # Arrays kept from the step before serve the next one.
    assert sampler.sample(logits, specs)[0] == expected


def test_equal_logits_at_a_bar_are_all_kept() -> None:
    logits = np.full((1, 700), -5.0, dtype=np.float32)
    logits[0, [3, 600]] = 2.0
    logits[0, [5, 9, 650]] = 1.0
    sampler = Sampler(700)
    for params in (SamplingParams(top_k=3), SamplingParams(top_p=0.7), SamplingParams(min_p=math.exp(-1.001))):
        drawn = {sampler.sample(logits, [SampleSpec(0, 1, position, params)])[0][0] for position in range(200)}
        assert drawn == {3, 5, 9, 600, 650}

"""The OpenVINO executor on the default model in exact mode: however a text is cut into steps, the tokens are the same.

A difference is excused only at a near-tie: the two best logits within 1e-3 of each other, where rounding decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import openvino
import openvino_genai
import pytest

from tidegate.executor.base import ExecutorError
from tidegate.executor.openvino import ModelFacts, OpenVINOExecutor
from tidegate.request import SamplingParams, TokenLogprobs
from tidegate.scheduler.step import IN_FLIGHT_TOKEN, SampleSpec, StepPlan, StepResult, StepRow

if TYPE_CHECKING:
    from tidegate.models import ModelSource

NEAR_TIE = 1e-3
GREEDY = SamplingParams(temperature=0.0, logprobs=2)
NUM_THREADS = 2
KV_MEMORY = 256 * 2**20

TEXTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "Water boils at",
    "def fibonacci(n):\n    ",
    "My favourite colour is blue because",
    "In 1969, the first humans",
    "A list of fruits: apple, banana,",
    "Dear Sir or Madam,\n\nI am writing to",
    "The quick brown fox",
    "To make bread you need flour,",
    "Photosynthesis is the process by which",
    "1 + 1 = 2, 2 + 2 =",
    "Der schnelle braune Fuchs",
    "The three primary colours are",
    "She opened the door and saw",
    "An introduction to linear algebra: a vector is",
    "Q: Who wrote Hamlet?\nA:",
    "The stock market fell today because",
    "import numpy as np\n",
    "Roses are red,",
)


def build(model: ModelSource, **changes: object) -> OpenVINOExecutor:
    options = {"kv_memory": KV_MEMORY, "kv_cache_dtype": "f32", "num_threads": NUM_THREADS} | changes
    facts = ModelFacts(model.name, model.weight_format, model.architecture.context_length, model.weight_digest)
    return OpenVINOExecutor(model.ir_path, facts, **options)


@pytest.fixture(scope="module")
def executor(default_model: ModelSource) -> Iterator[OpenVINOExecutor]:
    executor = build(default_model)
    yield executor
    executor.close()


@pytest.fixture(scope="module")
def small(default_model: ModelSource) -> Iterator[OpenVINOExecutor]:
    """Another instance, with few blocks and buffers for few tokens."""
    small = build(default_model, kv_memory=12 * 2**20, max_num_batched_tokens=4)
    yield small
    small.close()


@pytest.fixture(scope="module")
def prompts(default_model: ModelSource) -> list[list[int]]:
    """Token ids of the texts; the executor does not care which tokenizer they come from."""
    tokenizer = openvino_genai.Tokenizer(default_model.tokenizer.path)
    return [tokenizer.encode(text).input_ids.data[0].tolist() for text in TEXTS]


def plan(rows: list[StepRow], copies: list[tuple[int, int]] | None = None) -> StepPlan:
    num_tokens = sum(len(row.token_ids) for row in rows)
    return StepPlan(0, rows, num_tokens, 0, num_tokens, copies or [])


def row(
    token_ids: list[int], num_computed: int, block_ids: list[int], offsets: tuple[int, ...] = (-1,), row_id: int = 0
) -> StepRow:
    """Offsets count from the end when negative."""
    samples = [SampleSpec(offset % len(token_ids), 0, 0, GREEDY) for offset in offsets]
    return StepRow(row_id, list(token_ids), num_computed, block_ids, samples)


def run(executor: OpenVINOExecutor, *rows: StepRow, copies: list[tuple[int, int]] | None = None) -> StepResult:
    return executor.collect(executor.launch(plan(list(rows), copies)))


Choice = tuple[int, float]
"""A greedy token, and by how much its logit is above the next one's."""


def choices(result: StepResult) -> list[Choice]:
    assert result.logprobs is not None
    return [(token_id, gap(entry)) for token_id, entry in zip(result.token_ids, result.logprobs, strict=True)]


def gap(entry: TokenLogprobs | None) -> float:
    assert entry is not None
    best, second = entry.top
    return best[1] - second[1]


def decode(
    executor: OpenVINOExecutor, block_ids: list[int], first: Choice, num_computed: int, num_tokens: int
) -> list[Choice]:
    """Greedy tokens from `first` on, one step each."""
    out = [first]
    while len(out) < num_tokens:
        out += choices(run(executor, row([out[-1][0]], num_computed, block_ids)))
        num_computed += 1
    return out


def generate(
    executor: OpenVINOExecutor, prompt: list[int], block_ids: list[int], num_tokens: int, chunk: int = 10_000
) -> list[Choice]:
    """Prefill in chunks, then decode."""
    for start in range(0, len(prompt), chunk):
        part = prompt[start : start + chunk]
        is_last = start + chunk >= len(prompt)
        result = run(executor, row(part, start, block_ids, (-1,) if is_last else ()))
    return decode(executor, block_ids, choices(result)[0], len(prompt), num_tokens)


def generate_together(executor: OpenVINOExecutor, prompts: list[list[int]], num_tokens: int) -> list[list[Choice]]:
    """In each step one more prompt joins, so that prefills and decodes share steps."""
    out: list[list[Choice]] = [[] for _ in prompts]
    for step in range(num_tokens + len(prompts) - 1):
        active = [i for i in range(len(prompts)) if i <= step and len(out[i]) < num_tokens]
        rows = []
        for i in active:
            tokens = [out[i][-1][0]] if out[i] else prompts[i]
            num_computed = len(prompts[i]) + len(out[i]) - 1 if out[i] else 0
            rows.append(row(tokens, num_computed, blocks(20 + 5 * i), row_id=i))
        for i, choice in zip(active, choices(run(executor, *rows)), strict=True):
            out[i].append(choice)
    return out


def same(expected: list[Choice], got: list[int] | list[Choice]) -> bool:
    """Equal up to the first near-tie."""
    assert len(expected) == len(got)
    for (token_id, token_gap), other in zip(expected, got, strict=True):
        if token_id != (other if isinstance(other, int) else other[0]):
            return token_gap <= NEAR_TIE
    return True


def long_prompt(prompts: list[list[int]], num_tokens: int) -> list[int]:
    joined = [token_id for prompt in prompts for token_id in prompt]
    return (joined * (num_tokens // len(joined) + 1))[:num_tokens]


def blocks(first: int, num_tokens: int = 160, block_size: int = 32) -> list[int]:
    return list(range(first, first + -(-num_tokens // block_size)))


@pytest.mark.parametrize("chunk", [1, 31, 32, 33])
def test_chunked_prefill_gives_the_tokens_of_a_whole_one(
    executor: OpenVINOExecutor, prompts: list[list[int]], chunk: int
) -> None:
    prompt = long_prompt(prompts, 70)
    whole = generate(executor, prompt, blocks(0), 8)
    assert same(whole, generate(executor, prompt, blocks(10), 8, chunk=chunk))


def test_rows_computed_together_give_the_tokens_of_rows_computed_alone(
    executor: OpenVINOExecutor, prompts: list[list[int]]
) -> None:
    alone = [generate(executor, prompt, blocks(0), 8) for prompt in prompts[:6]]
    together = generate_together(executor, prompts[:6], 8)
    assert all(same(one, other) for one, other in zip(alone, together, strict=True))


@pytest.mark.parametrize("num_cached_blocks", [1, 2])
@pytest.mark.parametrize("tail", [1, 31, 32, 33])
def test_a_reused_prefix_gives_the_tokens_of_a_computed_one(
    executor: OpenVINOExecutor, prompts: list[list[int]], num_cached_blocks: int, tail: int
) -> None:
    num_cached = num_cached_blocks * executor.block_size
    prompt = long_prompt(prompts, num_cached + tail)
    computed = generate(executor, prompt, blocks(0), 6)
    shared = [*blocks(0)[:num_cached_blocks], *blocks(10)]
    first = choices(run(executor, row(prompt[num_cached:], num_cached, shared)))[0]
    assert same(computed, decode(executor, shared, first, len(prompt), 6))


def test_a_copied_block_continues_like_its_source(executor: OpenVINOExecutor, prompts: list[list[int]]) -> None:
    prompt = long_prompt(prompts, 45)
    source = generate(executor, prompt, [0, 1, 2], 6)
    executor.copy_blocks([(0, 7), (1, 3), (3, 8)])  # in order: block 8 gets what block 1 held
    # Block 1 now holds tokens beyond the prompt too; they are overwritten as the copy continues.
    assert same(source, decode(executor, [7, 8, 9], source[0], len(prompt), 6))
    result = run(executor, row([source[0][0]], len(prompt), [11, 12]), copies=[(7, 11), (8, 12)])
    assert same(source[1:2], choices(result))


def test_blocks_read_here_and_written_elsewhere_continue_the_same(
    executor: OpenVINOExecutor, small: OpenVINOExecutor, prompts: list[list[int]]
) -> None:
    prompt = long_prompt(prompts, 45)
    source = generate(executor, prompt, [4, 5], 6)
    content = executor.read_blocks([4, 5])
    assert [len(data) for data in content] == [executor.info.bytes_per_block] * 2
    small.write_blocks([6, 1], content)
    assert small.read_blocks([6, 1]) == content
    assert same(source, decode(small, [6, 1], source[0], len(prompt), 6))
    with pytest.raises(ValueError, match="bytes"):
        small.write_blocks([0], [content[0][:-1]])


def test_greedy_tokens_agree_with_the_reference_pipeline(
    executor: OpenVINOExecutor, default_model: ModelSource, prompts: list[list[int]]
) -> None:
    reference = reference_tokens(default_model, prompts, 24)
    ours = generate_together(executor, prompts, 24)
    assert [text for text, one, other in zip(TEXTS, ours, reference, strict=True) if not same(one, other)] == []


def reference_tokens(model: ModelSource, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.num_kv_blocks = 200
    scheduler.enable_prefix_caching = False
    pipeline = openvino_genai.ContinuousBatchingPipeline(
        model.ir_path.parent,
        openvino_genai.Tokenizer(model.tokenizer.path),
        scheduler,
        "CPU",
        INFERENCE_PRECISION_HINT="f32",
        KV_CACHE_PRECISION="f32",
        DYNAMIC_QUANTIZATION_GROUP_SIZE=0,
        INFERENCE_NUM_THREADS=NUM_THREADS,
        ENABLE_CPU_PINNING=False,
    )
    config = openvino_genai.GenerationConfig(max_new_tokens=num_tokens, ignore_eos=True, do_sample=False)
    inputs = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
    return [list(result.m_generation_ids[0]) for result in pipeline.generate(inputs, [config] * len(inputs))]


def test_several_samples_of_a_row_read_the_logits_at_their_offsets(
    executor: OpenVINOExecutor, prompts: list[list[int]]
) -> None:
    """Two draws at one place, as n > 1 has, and draws at every token, as checking a guess has."""
    prompt = prompts[1]
    each = [choices(run(executor, row(prompt[: i + 1], 0, blocks(0))))[0] for i in range(len(prompt))]
    last = len(prompt) - 1
    offsets = (0, *range(len(prompt)), last, last)
    expected = [each[offset] for offset in offsets]
    got = choices(run(executor, row(prompts[0], 0, blocks(5)), row(prompt, 0, blocks(10), offsets)))[1:]
    assert all(same([one], [other]) for one, other in zip(expected, got, strict=True))


def test_a_plan_that_samples_nothing_or_has_no_rows_ends_with_no_tokens(executor: OpenVINOExecutor) -> None:
    assert run(executor, row([5, 6, 7], 0, [0], ())).token_ids == []
    assert run(executor, copies=[(0, 1)]).token_ids == []
    assert executor.read_blocks([0]) == executor.read_blocks([1])


def test_prompt_logprobs_are_those_of_the_known_next_tokens(
    executor: OpenVINOExecutor, prompts: list[list[int]]
) -> None:
    """In two chunks: the first knows the successor of its last token, the second does not."""
    prompt = prompts[1]
    scored = row(prompt[:4], 0, [0], ())
    scored.prompt_logprobs, scored.next_token_ids = 2, prompt[1:5]
    first = run(executor, row(prompts[0], 0, [5], row_id=7), scored)
    scored = row(prompt[4:], 4, [0])
    scored.prompt_logprobs, scored.next_token_ids = 2, prompt[5:]
    second = run(executor, scored, row(prompts[0], 0, [5], row_id=7))
    assert first.prompt_logprobs is not None and second.prompt_logprobs is not None
    entries = first.prompt_logprobs[0] + second.prompt_logprobs[0]
    assert [entry.token_id for entry in entries] == prompt[1:]
    assert len(second.token_ids) == 2
    for i, entry in enumerate(entries):
        free = run(executor, row(prompt[: i + 1], 0, blocks(8)))
        assert free.logprobs is not None and free.logprobs[0] is not None
        assert [entry.top[0][0]] == [free.token_ids[0]] or gap(free.logprobs[0]) <= NEAR_TIE
        assert entry.top[0][1] == pytest.approx(free.logprobs[0].logprob, abs=1e-3)
        assert entry.logprob <= entry.top[0][1]


def test_launch_returns_before_the_step_ends_and_takes_one_at_a_time(
    executor: OpenVINOExecutor, prompts: list[list[int]]
) -> None:
    handle = executor.launch(plan([row(long_prompt(prompts, 300), 0, blocks(0, 300))]))
    with pytest.raises(ExecutorError, match="in flight"):
        executor.launch(plan([row([1], 0, [20])]))
    with pytest.raises(ExecutorError, match="in flight"):
        executor.read_blocks([0])
    result = executor.collect(handle)
    assert len(result.token_ids) == 1 and result.compute_s > 0
    with pytest.raises(ExecutorError, match="not in flight"):
        executor.collect(handle)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda e: row([e.info.vocab_size], 0, [0]), "vocabulary"),
        (lambda e: row([-5], 0, [0]), "vocabulary"),
        (lambda e: row([IN_FLIGHT_TOKEN], 0, [0]), "in flight"),
        (lambda e: row([1], 0, [e.num_blocks]), "block id"),
        (lambda e: row([1], 0, [-1]), "block id"),
        (lambda e: row([1], e.block_size, [0]), "blocks for"),
        (lambda e: StepRow(0, [], 0, [0], []), "blocks for"),
        (lambda e: StepRow(0, [1, 2], 0, [0], [SampleSpec(2, 0, 0, GREEDY)]), "no sample at"),
        (lambda e: StepRow(0, [1, 2], 0, [0], [], prompt_logprobs=1, next_token_ids=[1, 2, 3]), "successors"),
    ],
)
def test_a_plan_that_cannot_be_computed_is_refused_and_the_next_one_runs(
    executor: OpenVINOExecutor, broken: Callable[[OpenVINOExecutor], StepRow], message: str
) -> None:
    good = row([504, 3575, 282], 0, [9])
    expected = run(executor, good).token_ids
    before = executor.read_blocks([0])
    with pytest.raises(ExecutorError, match=message):
        executor.launch(plan([row([7, 8], 0, [0]), broken(executor)], [(9, 0)]))
    assert executor.read_blocks([0]) == before
    assert run(executor, good).token_ids == expected


class FailingRequest:
    """An inference request whose library throws at the verb named."""

    def __init__(self, request: openvino.InferRequest, verb: str) -> None:
        self._request = request
        self._verb = verb

    def __getattr__(self, name: str) -> object:
        if name != self._verb:
            return getattr(self._request, name)

        def fail() -> None:
            self._request.wait()
            raise RuntimeError("no memory for the step")

        return fail


@pytest.mark.parametrize("verb", ["start_async", "wait"])
def test_a_fault_of_the_library_fails_one_step_and_the_next_one_runs(
    executor: OpenVINOExecutor, prompts: list[list[int]], verb: str
) -> None:
    expected = generate(executor, prompts[0], [0], 3)
    executor._request = FailingRequest(executor._request, verb)
    with pytest.raises(ExecutorError, match="no memory for the step"):
        run(executor, row(prompts[1], 0, [1]))
    assert same(expected, generate(executor, prompts[0], [0], 3))


def test_a_copy_from_or_to_a_block_that_does_not_exist_is_refused(executor: OpenVINOExecutor) -> None:
    for pair in ((0, executor.num_blocks), (-1, 0)):
        with pytest.raises(ExecutorError, match="does not exist"):
            executor.copy_blocks([pair])
    with pytest.raises(ExecutorError, match="does not exist"):
        executor.launch(plan([row([1], 0, [0])], [(0, executor.num_blocks)]))


def test_the_last_block_is_as_good_as_the_first(executor: OpenVINOExecutor, prompts: list[list[int]]) -> None:
    last = executor.num_blocks - 1
    assert same(generate(executor, prompts[0], [0], 4), generate(executor, prompts[0], [last], 4))


def test_plans_larger_than_announced_are_computed(small: OpenVINOExecutor, prompts: list[list[int]]) -> None:
    whole = generate(small, prompts[1], [0, 1], 4)
    assert same(whole, generate(small, prompts[1], [2, 3], 4, chunk=3))


@pytest.mark.parametrize("kv_cache_dtype", ["u8", "bf16"])
def test_the_other_precisions_keep_the_kv_memory_and_nearly_the_tokens(
    executor: OpenVINOExecutor, default_model: ModelSource, prompts: list[list[int]], kv_cache_dtype: str
) -> None:
    """Their blocks hold scales and smaller values, and are copied whole all the same."""
    kv_memory = 40 * 2**20
    other = build(default_model, kv_memory=kv_memory, kv_cache_dtype=kv_cache_dtype)
    try:
        check_kv_memory(other, default_model, kv_memory)
        prompt = prompts[0]
        expected = generate(executor, prompt, [0], 1)[0]
        assert generate(other, prompt, [2], 1)[0][0] == expected[0]
        other.copy_blocks([(2, 5)])
        assert other.read_blocks([5]) == other.read_blocks([2])
        assert decode(other, [2], expected, len(prompt), 4) == decode(other, [5], expected, len(prompt), 4)
    finally:
        other.close()
    with pytest.raises(ExecutorError, match="closed"):
        other.launch(plan([row([1], 0, [0])]))


def test_exact_mode_keeps_the_kv_memory_and_says_what_it_serves(
    executor: OpenVINOExecutor, default_model: ModelSource
) -> None:
    check_kv_memory(executor, default_model, KV_MEMORY)
    info = executor.info
    assert (info.kv_cache_dtype, info.compute_dtype) == ("f32", "f32")
    assert info.vocab_size == default_model.architecture.vocab_size
    assert info.weight_digest == default_model.weight_digest


def check_kv_memory(executor: OpenVINOExecutor, model: ModelSource, kv_memory: int) -> None:
    info, shape = executor.info, model.architecture
    assert 0.95 * kv_memory <= info.num_blocks * info.bytes_per_block <= kv_memory
    values = 2 * shape.num_layers * shape.num_kv_heads * shape.head_size * info.block_size
    bytes_a_value = {"u8": 1, "bf16": 2, "f32": 4}[info.kv_cache_dtype]
    assert values * bytes_a_value <= info.bytes_per_block <= 1.25 * values * bytes_a_value


def test_a_model_that_cannot_be_read_is_one_clear_error(tmp_path: Path) -> None:
    facts = ModelFacts("broken", "Q4_1", 2048)
    with pytest.raises(ExecutorError, match="cannot load the model"):
        OpenVINOExecutor(tmp_path / "absent.xml", facts, kv_memory=KV_MEMORY)

"""LLM: answers in order, and an engine that is empty whatever ends a call. Sim executor, a tiny model's tokenizer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.tiny_models import EOS_ID, write_tiny_gguf
from tidegate import LLM, InvalidRequest, SamplingParams
from tidegate.config import ConfigError
from tidegate.executor.base import ExecutorError
from tidegate.request import FinishReason
from tidegate.scheduler.step import StepPlan


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")
    cache = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
    try:
        with LLM(str(path), executor="sim", max_num_seqs=4, progress=False) as one:
            # The sim executor's pace is for servers.
            one._executor._sim.step_cost = type(one._executor._sim.step_cost)(0.0, 0.0, 0.0, 0.0)  # type: ignore[attr-defined]
            yield one
    finally:
        if cache is None:
            del os.environ["XDG_CACHE_HOME"]
        else:
            os.environ["XDG_CACHE_HOME"] = cache


@pytest.fixture(autouse=True)
def left_empty(llm: LLM) -> Iterator[None]:
    yield
    assert not llm._engine.has_work
    assert llm._engine.load(0.0).held_blocks == 0
    llm._engine.audit()


def fixed(max_tokens: int = 8, **changes: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=1, ignore_eos=True, **changes)  # type: ignore[arg-type]


def test_importing_the_package_loads_nothing_that_computes() -> None:
    code = "import sys, tidegate; print([m for m in ('numpy', 'openvino', 'pydantic', 'zmq') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_outputs_come_in_the_order_of_the_prompts_whatever_ends_first(llm: LLM) -> None:
    lengths = [9, 1, 30, 2, 17, 3, 5]
    prompts = [f"prompt {length}" for length in lengths]
    outputs = llm.generate(prompts, [fixed(length) for length in lengths])
    assert [len(output.token_ids) for output in outputs] == lengths
    assert [llm.tokenizer.decode(output.prompt_token_ids) for output in outputs] == prompts
    assert {output.finish_reason for output in outputs} == {FinishReason.LENGTH}
    assert [output.usage.completion_tokens for output in outputs] == lengths


def test_one_prompt_as_text_or_as_token_ids_is_a_list_of_one(llm: LLM) -> None:
    token_ids = llm.tokenizer.encode("hello world")
    (as_text,) = llm.generate("hello world", fixed())
    (as_ids,) = llm.generate(token_ids, fixed())
    (as_list,) = llm.generate([token_ids], fixed())
    assert as_text.token_ids == as_ids.token_ids == as_list.token_ids
    assert as_text.text == llm.tokenizer.decode(as_text.token_ids)
    assert as_text.usage.total_tokens == len(token_ids) + 8


def test_no_prompts_are_no_outputs(llm: LLM) -> None:
    assert llm.generate([]) == []


def test_a_seed_repeats_and_n_choices_differ(llm: LLM) -> None:
    first = llm.generate("hello", fixed(n=3))[0]
    again = llm.generate("hello", fixed(n=3))[0]
    assert [choice.token_ids for choice in first.choices] == [choice.token_ids for choice in again.choices]
    assert len({tuple(choice.token_ids) for choice in first.choices}) == 3
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert first.usage.completion_tokens == 24


def test_logprobs_are_parallel_to_the_tokens_and_absent_unless_asked_for(llm: LLM) -> None:
    output = llm.generate("hello", fixed(logprobs=1))[0]
    assert output.logprobs is not None
    assert [one.token_id for one in output.logprobs] == output.token_ids
    assert llm.generate("hello", fixed())[0].logprobs is None


def test_a_stop_string_ends_the_answer_and_nothing_after_it_is_counted(llm: LLM) -> None:
    whole = llm.generate("hello", fixed(40))[0]
    for length in range(1, len(whole.text)):
        stop = whole.text[length : length + 3]
        if "\ufffd" not in stop and whole.text.find(stop) == length:
            break
    cut = llm.generate("hello", fixed(40, stop=(stop,)))[0]
    assert cut.finish_reason is FinishReason.STOP
    assert cut.text == whole.text[:length]
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
    assert cut.usage.completion_tokens == len(cut.token_ids) < 40


def test_a_chat_is_rendered_with_the_models_template(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "hi"}]
    (one,) = llm.chat(conversation, fixed())
    rendered = llm.tokenizer.decode(one.prompt_token_ids, skip_special_tokens=False)
    assert rendered == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert [output.token_ids for output in llm.chat([conversation, conversation], fixed())] == [one.token_ids] * 2


def test_the_models_own_end_ends_an_answer(llm: LLM) -> None:
    request = llm._request([5, 6], SamplingParams(max_tokens=4))
    assert EOS_ID in request.stop_token_ids
    assert EOS_ID not in llm._request([5, 6], fixed()).stop_token_ids


@pytest.mark.parametrize(
    ("prompts", "params", "match"),
    [
        ([["hello"], [5]], None, "a text or a list of token ids"),
        ([5.0], None, "a text or a list of token ids"),
        ([[]], None, "empty"),
        ([[1, 10_000]], None, "10000 is outside"),
        ([[-1]], None, "-1 is outside"),
        ("hello", SamplingParams(max_tokens=512), "do not fit the model's 512"),
        ([list(range(3, 20)) * 40], None, "do not fit"),
        (["a", "b"], [SamplingParams()], "1 params for 2 prompts"),
    ],
)
def test_a_mistake_is_told_before_anything_is_computed(llm: LLM, prompts: object, params: object, match: str) -> None:
    num_steps = llm._engine.scheduler.stats.num_computed_tokens
    with pytest.raises(InvalidRequest, match=match):
        llm.generate(prompts, params)  # type: ignore[arg-type]
    assert llm._engine.scheduler.stats.num_computed_tokens == num_steps


def test_a_setting_that_is_none_is_named() -> None:
    with pytest.raises(ConfigError, match="max_num_sex"):
        LLM(max_num_sex=3)


def test_ctrl_c_leaves_the_engine_empty_and_usable(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = llm._executor.launch

    def interrupting(plan: StepPlan) -> object:
        if plan.step_id % 4 == 0:
            os.kill(os.getpid(), signal.SIGINT)
        return launch(plan)

    monkeypatch.setattr(llm._executor, "launch", interrupting)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([f"prompt {i}" for i in range(9)], fixed(400))
    assert not llm._engine.has_work
    monkeypatch.undo()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert len(llm.generate("hello", fixed(3))[0].token_ids) == 3


def test_a_step_that_fails_is_an_answer_with_an_error_and_the_others_go_on(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = llm._executor.launch
    has_failed = False

    def failing(plan: StepPlan) -> object:
        nonlocal has_failed
        if not has_failed:
            has_failed = True
            raise ExecutorError("out of luck")
        return launch(plan)

    monkeypatch.setattr(llm._executor, "launch", failing)
    outputs = llm.generate([f"prompt {i}" for i in range(6)], fixed(4, n=1))
    errors = [output.choices[0].error for output in outputs if output.finish_reason is FinishReason.ERROR]
    assert errors == ["out of luck"] * 4
    assert [len(output.token_ids) for output in outputs[4:]] == [4, 4]

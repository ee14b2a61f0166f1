"""From a model and a configuration to executor, engine, tokenizer and template: the same for serving and offline use.

Owns: the choice of the executor, and how many tokens a request may have, given the model and the KV memory.
"""

from __future__ import annotations

from dataclasses import replace

from tidegate.clock import RealClock
from tidegate.config import Config, ConfigError
from tidegate.cost_model import CostModel, StepCost
from tidegate.engine.engine import Engine
from tidegate.executor.base import Executor, ExecutorError, ExecutorInfo
from tidegate.executor.sim import SimExecutor
from tidegate.models.source import ModelSource
from tidegate.request import SamplingParams
from tidegate.scheduler.step import SampleSpec, StepPlan, StepRow
from tidegate.text.chat_template import ChatTemplate
from tidegate.text.tokenizer import Tokenizer
from tidegate.worker.calibration import measure_step_cost
from tidegate.worker.paced_sim import PacedSimExecutor, first_text_token_id, sim_info

_WARM_UP_TOKENS = 32


def build_executor(model: ModelSource, config: Config) -> Executor:
    """Load the weights and take the KV memory. Raises ConfigError with one line."""
    if config.worker.executor == "sim":
        try:
            sim = SimExecutor(sim_info(model, config), first_token_id=first_text_token_id(model))
        except ExecutorError as error:
            raise ConfigError(str(error)) from error
        return PacedSimExecutor(sim)
    # Imported here: it takes half a second, and whoever computes nothing does not need it.
    from tidegate.executor.openvino import ModelFacts, OpenVINOExecutor

    facts = ModelFacts(model.name, model.weight_format, model.architecture.context_length, model.weight_digest)
    try:
        executor = OpenVINOExecutor(
            model.ir_path,
            facts,
            kv_memory=config.cache.kv_memory,
            kv_cache_dtype=config.cache.kv_cache_dtype,
            num_threads=config.worker.num_threads,
            max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        )
        _warm_up(executor, config.scheduler.max_num_batched_tokens)
    except ExecutorError as error:
        raise ConfigError(str(error)) from error
    return executor


def _warm_up(executor: Executor, max_num_batched_tokens: int) -> None:
    """One prefill and one decode. The first step of a process takes most of a second longer than any later one: no
    request should pay for it, and no cost model learn from it. What it leaves in its blocks is never read."""
    num_tokens = min(_WARM_UP_TOKENS, max_num_batched_tokens, executor.block_size - 1)
    greedy = SamplingParams(temperature=0.0)
    for token_ids, num_computed in (([0] * num_tokens, 0), ([0], num_tokens)):
        row = StepRow(0, token_ids, num_computed, [0], [SampleSpec(len(token_ids) - 1, 0, 0, greedy)])
        plan = StepPlan(0, [row], len(token_ids), 0, num_computed + len(token_ids))
        executor.collect(executor.launch(plan))


def initial_step_cost(executor: Executor, config: Config) -> StepCost:
    """What a step costs here, from a few that are timed. Raises ConfigError when one cannot be computed."""
    if isinstance(executor, PacedSimExecutor):
        return executor.step_cost
    limits = config.scheduler
    try:
        return measure_step_cost(
            executor,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            now=RealClock().now,
        )
    except ExecutorError as error:
        raise ConfigError(str(error)) from error


def build_engine(executor: Executor, config: Config, step_cost: StepCost | None = None) -> Engine:
    """Raises ConfigError when an explicit max_model_len fits neither the model nor the KV memory."""
    info = replace(executor.info, max_model_len=fit_model_len(executor.info, config.model.max_model_len))
    return Engine(info, config.scheduler, config.cache, CostModel(step_cost))


def fit_model_len(info: ExecutorInfo, max_model_len: int | None) -> int:
    """Most tokens of prompt plus answer. `info.max_model_len` is the model's own. Raises ConfigError."""
    num_kv_tokens = info.num_blocks * info.block_size
    if max_model_len is None:
        return min(info.max_model_len, num_kv_tokens)
    if max_model_len > info.max_model_len:
        raise ConfigError(f"--max-model-len {max_model_len} is above the {info.max_model_len} tokens of {info.model}")
    if max_model_len > num_kv_tokens:
        needed = -(-max_model_len // info.block_size) * info.bytes_per_block
        raise ConfigError(
            f"--max-model-len {max_model_len} does not fit the KV memory: it holds {num_kv_tokens} tokens "
            f"({info.num_blocks} blocks of {info.block_size}); use --kv-memory {-(-needed // 2**20)}MiB or more, "
            f"or --max-model-len {num_kv_tokens} or less"
        )
    return max_model_len


def load_text(model: ModelSource) -> tuple[Tokenizer, ChatTemplate]:
    """Raises ConfigError."""
    source = model.tokenizer
    tokenizer = Tokenizer.from_path(source.path if source.kind == "gguf" else source.path.parent)
    return tokenizer, ChatTemplate(tokenizer, model.chat_template)

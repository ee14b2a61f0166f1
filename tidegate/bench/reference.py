"""The reference for speed: the same model file, kernels and settings under OpenVINO GenAI's continuous batching.

Owns: that pipeline, given the same KV blocks, step budget, hints and token ids as our executor, and a loop that adds
the next request when one ends. Its scheduler's `max_num_seqs` does not cap what runs, so the loop does.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from tidegate.bench.fixed_work import Answered, FixedWork, WorkRun, check_answers
from tidegate.config import Config
from tidegate.executor.base import ExecutorInfo
from tidegate.executor.openvino_model import choose_precision, compile_settings
from tidegate.models.source import ModelSource


class ReferencePipeline:
    def __init__(self, model: ModelSource, info: ExecutorInfo, config: Config) -> None:
        """`info` and `config` are those of the engine that it is compared with."""
        import openvino_genai  # here: half a second, and only needed when it is run

        self._genai: Any = openvino_genai
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_batched_tokens = config.scheduler.max_num_batched_tokens
        scheduler.max_num_seqs = config.scheduler.max_num_seqs
        scheduler.num_kv_blocks = info.num_blocks
        scheduler.cache_size = 0
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = False
        precision = choose_precision(config.cache.kv_cache_dtype, info.compute_dtype == "bf16")
        settings = compile_settings(precision, config.worker.num_threads)
        tokenizer_path = model.tokenizer.path
        source = tokenizer_path if model.tokenizer.kind == "gguf" else tokenizer_path.parent
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            str(model.ir_path.parent), openvino_genai.Tokenizer(str(source)), scheduler, "CPU", **settings
        )
        self._num_requests = 0

    def run(self, work: Sequence[FixedWork], num_at_once: int) -> WorkRun:
        """Raises RuntimeError when an answer is not what was asked for."""
        pipeline, finished = self._pipeline, self._genai.GenerationStatus.FINISHED
        inputs = [self._input(item) for item in work]
        answers = [Answered() for _ in work]
        running: list[tuple[Answered, Any]] = []
        num_added = num_steps = 0
        start_s = time.monotonic()
        while num_added < len(work) or running:
            while num_added < len(work) and len(running) < num_at_once:
                handle = pipeline.add_request(self._num_requests, *inputs[num_added])
                running.append((answers[num_added], handle))
                self._num_requests += 1
                num_added += 1
            pipeline.step()
            num_steps += 1
            now = time.monotonic()
            has_ended = False
            for answer, handle in running:
                if handle.can_read():
                    if not answer.token_ids:
                        answer.first_token_s = now
                    answer.token_ids += handle.read()[0].generated_ids
                    answer.last_token_s = now
                has_ended |= handle.get_status() == finished
            if has_ended:
                running = [pair for pair in running if pair[1].get_status() != finished]
        wall_s = time.monotonic() - start_s
        check_answers(work, answers)
        return WorkRun(wall_s, num_steps, answers)

    def _input(self, item: FixedWork) -> tuple[Any, Any]:
        from openvino import Tensor

        config = self._genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = item.num_output_tokens
        config.ignore_eos = True
        config.do_sample = False
        return Tensor(np.array([item.prompt_token_ids], dtype=np.int64)), config

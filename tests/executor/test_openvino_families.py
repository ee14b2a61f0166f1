"""Other model families through the executor: tiny random models give the greedy tokens of the reference pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai
import pytest

from tests.tiny_models import write_tiny_gguf
from tidegate.executor.openvino import ModelFacts, OpenVINOExecutor
from tidegate.models.load import resolve_model
from tidegate.request import SamplingParams
from tidegate.scheduler.step import SampleSpec, StepPlan, StepRow

NEAR_TIE = 1e-3
GREEDY = SamplingParams(temperature=0.0, logprobs=2)
NUM_TOKENS = 16
PROMPTS = ([5, 77, 130, 9], list(range(3, 80)), [200])
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", "num_kv_heads": 4},
    "llama with grouped queries": {"family": "llama", "num_kv_heads": 2},
    "llama with one kv head": {"family": "llama", "num_kv_heads": 1},
    "qwen2": {"family": "qwen2"},
    "qwen3": {"family": "qwen3"},
    "tied embeddings": {"family": "llama", "tied_embeddings": True},
}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_gives_the_tokens_of_the_reference_pipeline(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = resolve_model(str(write_tiny_gguf(tmp_path / "tiny.gguf", **FAMILIES[name])), progress=False)
    facts = ModelFacts(source.name, source.weight_format, source.architecture.context_length)
    executor = OpenVINOExecutor(
        source.ir_path, facts, kv_memory=8 * 2**20, kv_cache_dtype="f32", num_threads=2, max_num_batched_tokens=128
    )
    try:
        assert executor.info.vocab_size == source.architecture.vocab_size
        ours = [generate(executor, prompt) for prompt in PROMPTS]
    finally:
        executor.close()
    for (tokens, gaps), expected in zip(ours, reference(source.ir_path.parent, source.tokenizer.path), strict=True):
        differing = [i for i in range(NUM_TOKENS) if tokens[i] != expected[i]]
        assert not differing or gaps[differing[0]] <= NEAR_TIE


def generate(executor: OpenVINOExecutor, prompt: list[int]) -> tuple[list[int], list[float]]:
    """Greedy tokens, and by how much each one's logit is above the next one's."""
    tokens: list[int] = []
    gaps: list[float] = []
    pending, num_computed = prompt, 0
    while len(tokens) < NUM_TOKENS:
        row = StepRow(0, pending, num_computed, [4, 0, 2, 1], [SampleSpec(len(pending) - 1, 0, 0, GREEDY)])
        result = executor.collect(executor.launch(StepPlan(0, [row], len(pending), 0, len(pending))))
        assert result.logprobs is not None and result.logprobs[0] is not None
        best, second = result.logprobs[0].top
        gaps.append(best[1] - second[1])
        num_computed += len(pending)
        pending = result.token_ids
        tokens += pending
    return tokens, gaps


def reference(ir_folder: Path, gguf: Path) -> list[list[int]]:
    pipeline = openvino_genai.LLMPipeline(
        ir_folder,
        openvino_genai.Tokenizer(gguf),
        "CPU",
        INFERENCE_PRECISION_HINT="f32",
        KV_CACHE_PRECISION="f32",
        DYNAMIC_QUANTIZATION_GROUP_SIZE=0,
        INFERENCE_NUM_THREADS=2,
        ENABLE_CPU_PINNING=False,
    )
    config = openvino_genai.GenerationConfig(max_new_tokens=NUM_TOKENS, ignore_eos=True, do_sample=False)
    return [
        list(pipeline.generate(openvino.Tensor(np.array([prompt], dtype=np.int64)), config).tokens[0])
        for prompt in PROMPTS
    ]

"""tidegate simulate as its users meet it: same seed, same bytes; everything accounted for; variants, events."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tidegate.bench.outcome import Ending
from tidegate.bench.trace import TraceOptions
from tidegate.cli import app
from tidegate.config import Config, ConfigError
from tidegate.sim.clients import ClientOptions, SimClients
from tidegate.sim.profile import load_profile, profile_names, to_toml
from tidegate.sim.recommend import fewest, recommend
from tidegate.sim.simulate import SimulateOptions, Simulation, run
from tidegate.sim.variants import Variant, variants_of

DATA = Path(__file__).parent / "data"
MOONCAKE = str(DATA / "mooncake_conversation_sample.jsonl")
SHORT = SimulateOptions(rate=3.0, duration_s=15.0)


def document_of(options: SimulateOptions, tmp_path: Path, name: str = "out.json") -> tuple[dict[str, Any], bytes]:
    path = tmp_path / name
    assert run(replace(options, json_path=str(path))) == 0
    return json.loads(path.read_text()), path.read_bytes()


@pytest.mark.parametrize("workload", ["uniform", "heavy", "chat", "batch", "mixed"])
def test_the_same_seed_gives_the_same_bytes_and_another_seed_does_not(tmp_path: Path, workload: str):
    options = replace(SHORT, workload=workload, rate=2.0, workers=2)
    _, first = document_of(options, tmp_path)
    _, again = document_of(options, tmp_path)
    _, other = document_of(replace(options, seed=1), tmp_path)
    assert first == again != other


@pytest.mark.parametrize("rate", [1.0, 12.0])
def test_every_request_and_token_is_accounted_for(tmp_path: Path, rate: float):
    document, _ = document_of(replace(SHORT, workload="heavy", rate=rate), tmp_path)
    (variant,) = document["variants"]
    account, served = variant["account"], document["served"]
    assert account["adds_up"]
    assert len(served) == account["requests"]["sent"] == variant["sent"] == document["requests"]
    assert account["output_tokens"]["delivered"] == sum(record["output_tokens"] for record in served)
    assert account["output_tokens"]["computed"] == sum(
        account["output_tokens"][name] for name in ("delivered", "dropped")
    )
    answered = [record for record in served if record["output_tokens"]]
    computed = sum(record["prompt_tokens"] - record["cached_tokens"] for record in answered)
    # Each output token but the last of an answer is fed back, and clients that hang up leave some behind.
    fed_back = account["output_tokens"]["computed"] - len(answered)
    engine = account["engine_tokens"]
    assert engine["computed"] - engine["replayed"] >= computed + fed_back
    assert engine["computed"] - engine["replayed"] - computed - fed_back <= 6_000  # prompts cut off by a hang-up


def test_conversations_hit_what_was_answered(tmp_path: Path):
    document, _ = document_of(replace(SHORT, workload="chat", rate=2.0, duration_s=30.0), tmp_path)
    later = [one for one in document["served"] if one["cached_tokens"] > 200]
    assert later and document["variants"][0]["prefix"]["hit_ratio"] > 0.5


def test_a_trace_hits_its_shared_blocks(tmp_path: Path):
    options = replace(
        SHORT, trace=MOONCAKE, trace_options=TraceOptions(scale_time=10.0), profile="h100x8-llama2-70b", ttft_slo="5s"
    )
    document, _ = document_of(options, tmp_path)
    served = document["served"]
    assert served[0]["cached_tokens"] == 0
    assert all(record["cached_tokens"] >= 512 for record in served[1:])


def test_all_combinations_are_compared_or_one_change_at_a_time():
    base = Variant(Config(), 1)
    axes = ["order=deadline,fifo", "admission=on,off batching=static,continuous"]
    names = [variant.name for variant in variants_of(base, axes)]
    assert len(names) == 8 and names[0] == "order=deadline admission=on batching=static"
    single = variants_of(base, axes, one_at_a_time=True)
    assert [one.name for one in single][:3] == ["base", "order=deadline", "order=fifo"]
    assert single[2].config.gate.order == "fifo" and single[2].config.gate.admission == "on"


def test_a_variant_changes_what_it_names():
    (variant,) = variants_of(Variant(Config(), 1), ["workers=4", "eviction=lfu", "max-num-seqs=3", "batching=static"])
    assert variant.num_workers == 4
    assert variant.config.cache.eviction == "lfu"
    assert variant.batching is not None and variant.batching.batch_size == 3


@pytest.mark.parametrize(
    ("axes", "what"),
    [
        (["order"], "settings like"),
        (["order=sideways"], "'gate.order'"),
        (["colour=red"], "unknown setting 'colour'"),
        (["batching=random"], "batching is one of"),
        (["workers=0"], "workers takes a number"),
        (["order=fifo", "order=deadline"], "twice"),
        (["workers=1,2,3,4,5,6,7,8,9", "max_num_seqs=1,2,3,4,5,6,7,8"], "72 runs"),
    ],
)
def test_a_bad_comparison_is_told(axes: list[str], what: str):
    with pytest.raises(ConfigError, match=what):
        variants_of(Variant(Config(), 1), axes)


def test_static_batches_are_worse_than_continuous_ones(tmp_path: Path):
    document, _ = document_of(replace(SHORT, rate=2.0, compare=("batching=continuous,static admission=off",)), tmp_path)
    continuous, static = document["variants"]
    assert continuous["attainment"] > static["attainment"]
    assert continuous["account"]["output_tokens"] == static["account"]["output_tokens"]


def test_events_are_spans_of_workers_and_requests(tmp_path: Path):
    path = tmp_path / "events.json"
    assert run(replace(SHORT, workers=2, events_path=str(path))) == 0
    events = json.loads(path.read_text())["traceEvents"]
    lanes = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert lanes == {"gate", "worker w0", "worker w1"}
    for pid in (1, 2):
        steps = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X" and e["pid"] == pid)
        assert steps and all(one[1] <= other[0] + 1e-3 for one, other in pairwise(steps))
    begins = sum(event["ph"] == "b" for event in events)
    assert begins == sum(event["ph"] == "e" for event in events) > 0


def test_retries_come_back_after_the_time_they_were_told(tmp_path: Path):
    options = replace(SHORT, rate=8.0)
    plain, _ = document_of(options, tmp_path)
    retried, _ = document_of(replace(options, retries=True), tmp_path)
    assert plain["variants"][0]["attempts"] == plain["variants"][0]["sent"]
    assert retried["variants"][0]["attempts"] > retried["variants"][0]["sent"]


def test_a_conversation_whose_turn_is_refused_sends_no_more():
    simulation = Simulation.prepare(replace(SHORT, workload="chat", rate=60.0, duration_s=5.0, ttft_slo="200ms"))
    outcomes = simulation.run(Variant(simulation.config, 1)).outcomes
    by_index = {outcome.item.index: outcome for outcome in outcomes}
    unsent = [one for one in outcomes if one.ending is Ending.UNSENT]
    assert unsent and len(by_index) == len(simulation.work.items)
    for one in unsent:
        assert one.item.parent is not None
        assert by_index[one.item.parent].ending in (Ending.REFUSED, Ending.UNSENT)


@pytest.mark.parametrize("name", profile_names())
def test_a_profile_survives_being_written(tmp_path: Path, name: str):
    profile = load_profile(name)
    path = tmp_path / "own.toml"
    path.write_text(to_toml(profile))
    assert load_profile(str(path)) == profile
    assert profile.source and profile.kind in ("measured", "published")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("kind = 3", "'"),
        ("[", "not valid TOML"),
        (to_toml(load_profile("cpu-2core-smollm2")) + "\ncolour = 1\n", "colour"),
    ],
)
def test_a_bad_profile_is_told(tmp_path: Path, text: str, what: str):
    path = tmp_path / "own.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=what):
        load_profile(str(path))


def test_an_unknown_profile_is_told_with_what_is_near():
    with pytest.raises(ConfigError, match="did you mean h100x8-llama2-70b"):
        load_profile("h100x8-llama-70b")


def test_the_configuration_wins_over_the_profile(tmp_path: Path):
    profile = load_profile("h100x8-llama2-70b")
    assert profile.configure(Config()).scheduler.max_num_seqs == 64
    own = Config.model_validate({"scheduler": {"max_num_seqs": 8}})
    assert profile.configure(own).scheduler.max_num_seqs == 8
    assert profile.configure(own).scheduler.max_num_batched_tokens == 2048


@pytest.mark.parametrize(("needed", "start"), [(1, 1), (1, 8), (5, 1), (6, 4), (64, 3)])
def test_the_fewest_machines_are_found(needed: int, start: int):
    tried: list[int] = []

    def holds(number: int) -> bool:
        tried.append(number)
        return number >= needed

    assert fewest(holds, start, 100) == needed
    assert len(tried) == len(set(tried))
    assert fewest(lambda _: False, start, 100) is None


def test_a_recommendation_holds_and_one_machine_less_does_not():
    options = replace(SHORT, rate=9.0, duration_s=20.0, ttft_slo="1s", tpot_slo="100ms")
    simulation = Simulation.prepare(options)
    found = recommend(simulation, 0.95)
    assert found.workers >= 2 and found.best.figures["attainment"] >= 0.95
    fewer = simulation.run(Variant(simulation.config, found.workers - 1))
    assert fewer.figures["attainment"] < 0.95
    assert found.max_num_seqs <= simulation.config.scheduler.max_num_seqs


def test_objectives_that_an_idle_machine_misses_are_told():
    simulation = Simulation.prepare(replace(SHORT, ttft_slo="1ms"))
    with pytest.raises(ConfigError, match="no number of machines"):
        recommend(simulation, 0.99)


def test_prompts_are_forgotten_when_their_requests_have_ended():
    simulation = Simulation.prepare(SHORT)
    kept = []
    clients = SimClients(simulation.work.items, ClientOptions(), lambda _, result: kept.append(result))
    clients.run(simulation.simulator(Variant(simulation.config, 1), clients))
    assert len(kept) == len(simulation.work.items)
    assert all(result is not None and result.request.prompt_token_ids == [] for result in kept)


def test_the_command_takes_settings_to_compare_as_words(tmp_path: Path):
    path = tmp_path / "out.json"
    command = ["simulate", "--rate", "2", "--duration", "5s", "--json", str(path)]
    result = CliRunner().invoke(app, [*command, "--compare", "order=deadline,fifo", "admission=on,off"])
    assert result.exit_code == 0, result.output
    assert [one["name"] for one in json.loads(path.read_text())["variants"]] == [
        "order=deadline admission=on",
        "order=deadline admission=off",
        "order=fifo admission=on",
        "order=fifo admission=off",
    ]


@pytest.mark.parametrize(
    "arguments", [["order=fifo"], ["--duration", "0s"], ["--profile", "none"], ["--trace", "none"]]
)
def test_a_bad_command_is_one_clear_line(arguments: list[str]):
    result = CliRunner().invoke(app, ["simulate", *arguments])
    assert isinstance(result.exception, ConfigError)
    assert "\n" not in str(result.exception)

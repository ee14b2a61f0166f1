"""Frontend: streams, books and health over a real Gate and a scripted worker; only the clock is simulated."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from tests.engine_driver import make_request
from tidegate.api.errors import Outcome, Refused
from tidegate.api.frontend import Frontend
from tidegate.clock import SimClock
from tidegate.config import Config, ConfigError, TierConfig, load_config
from tidegate.gate.gate import Gate
from tidegate.metrics.load_snapshot import LoadReport, StepStats
from tidegate.metrics.registry import ServerMetrics
from tidegate.request import FinishReason, PrefillTimes, Request, RequestOutput, SamplingParams
from tidegate.worker.messages import Cancel, StepReport, Submit, ToWorker, WorkerInfo


class ScriptedWorker:
    """Stands where a WorkerSupervisor stands."""

    worker_id = "0"

    def __init__(self) -> None:
        self.sent: list[ToWorker] = []
        self.is_stopped = False

    def start(self) -> None:
        pass

    def send(self, message: ToWorker) -> None:
        self.sent.append(message)

    async def stop(self) -> None:
        self.is_stopped = True


class Scene:
    def __init__(self, **settings: Any) -> None:
        config: Config = load_config(None, {"admission": "off", **settings})
        self.clock = SimClock(10.0)
        self.gate = Gate(config)
        self.metrics = ServerMetrics()
        self.frontend = Frontend(config, self.gate, self.metrics, self.clock)
        self.worker = ScriptedWorker()
        self.frontend.add_worker(self.worker)  # type: ignore[arg-type]
        self._step_id = 0

    def ready(self, incarnation: str = "i", max_num_seqs: int = 4) -> None:
        self.frontend.model = object()  # type: ignore[assignment]  # only whether there is one matters here
        info = WorkerInfo(
            worker_id="0",
            incarnation=incarnation,
            pid=1,
            version="",
            protocol_version=1,
            model="m",
            weight_digest="",
            weight_format="",
            kv_cache_dtype="u8",
            compute_dtype="bf16",
            block_size=32,
            num_blocks=100,
            bytes_per_block=1,
            vocab_size=1000,
            max_model_len=3200,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=512,
        )
        self.frontend.worker_ready(info)

    def report(self, *outputs: RequestOutput, incarnation: str = "i") -> None:
        self._step_id += 1
        now = self.clock.now()
        load = LoadReport(now, 1, 0, 0, 0, 90, 5, 5, 0.0, 0, 0)
        stats = StepStats(self._step_id, now, 0.01, 0.011, 4, 1, 9, 0, 0)
        self.frontend.worker_report("0", StepReport(incarnation, list(outputs), load, stats))

    def token(
        self, request_id: str, token_id: int, reason: FinishReason | None = None, index: int = 0
    ) -> RequestOutput:
        return RequestOutput(request_id, index, [token_id], self.clock.now(), reason)

    def submitted(self) -> list[str]:
        return [message.request.request_id for message in self.worker.sent if isinstance(message, Submit)]

    def counted(self, outcome: Outcome) -> float:
        for family in self.metrics.families():
            if family.name == "tidegate_requests":
                return sum(one.value for one in family.samples if one.labels["outcome"] == outcome)
        raise AssertionError("no such metric")


def play(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(scenario())


def test_all_outputs_of_a_step_and_of_steps_not_yet_read_come_in_one_wake_up() -> None:
    async def scenario() -> None:
        scene = Scene()
        scene.ready()
        stream = scene.frontend.submit(make_request("a", [1, 2], 8))
        assert scene.submitted() == ["a"]
        reading = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        scene.report(scene.token("a", 5))
        assert [output.token_ids for output in await reading] == [[5]]
        scene.report(scene.token("a", 6))
        scene.report(scene.token("a", 7, FinishReason.LENGTH))
        assert [output.token_ids for output in await anext(stream)] == [[6], [7]]
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    play(scenario)


def test_a_stream_ends_after_the_last_choice() -> None:
    async def scenario() -> None:
        scene = Scene()
        scene.ready()
        stream = scene.frontend.submit(make_request("a", [1], 8, params=SamplingParams(n=2)))
        scene.report(scene.token("a", 5, FinishReason.STOP, index=1))
        assert len(await anext(stream)) == 1
        scene.report(scene.token("a", 5, FinishReason.STOP, index=0))
        assert len(await anext(stream)) == 1
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    play(scenario)


@pytest.mark.parametrize("phase", ["queued", "dispatched", "running"])
def test_close_in_any_phase_cancels_once_and_ends_a_waiting_reader(phase: str) -> None:
    async def scenario() -> None:
        scene = Scene()
        if phase != "queued":
            scene.ready()
        else:
            scene.frontend.model = object()  # type: ignore[assignment]
            scene.ready(max_num_seqs=1)
            for number in range(8):
                scene.frontend.submit(make_request(f"other {number}", [1], 8))
        stream = scene.frontend.submit(make_request("a", [1], 8))
        if phase == "running":
            scene.report(scene.token("a", 5))
            await anext(stream)
        reading = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        stream.close()
        stream.close()
        with pytest.raises(StopAsyncIteration):
            await reading
        assert scene.worker.sent.count(Cancel("a")) == (phase != "queued")
        scene.report(scene.token("a", 6))  # on its way when the cancel came
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        scene.frontend.record("a", outcome=Outcome.CANCELLED)
        assert scene.counted(Outcome.CANCELLED) == 1

    play(scenario)


def test_a_refusal_at_the_door_is_raised_and_counted_once() -> None:
    async def scenario() -> None:
        scene = Scene()
        scene.ready()
        with pytest.raises(Refused) as caught:
            scene.frontend.submit(make_request("a", [1] * 100, 4000))
        scene.frontend.record("a", outcome=caught.value.outcome)
        assert caught.value.outcome is Outcome.NEVER_FITS
        assert scene.counted(Outcome.NEVER_FITS) == 1
        assert scene.worker.sent == []

    play(scenario)


def test_before_the_model_is_there_everything_is_refused() -> None:
    async def scenario() -> None:
        scene = Scene()
        scene.frontend.worker_loading("0", "reading weights")
        assert (scene.frontend.health().reason, scene.frontend.health().detail) == ("loading", "reading weights")
        with pytest.raises(Refused, match="reading weights"):
            scene.frontend.submit(make_request("a", [1], 8))

    play(scenario)


def test_a_request_that_waits_too_long_is_refused_from_its_stream_by_the_timer() -> None:
    async def scenario() -> None:
        scene = Scene(queue_timeout="10ms")
        scene.ready(max_num_seqs=1)
        for number in range(8):
            scene.frontend.submit(make_request(f"other {number}", [1], 8))
        stream = scene.frontend.submit(make_request("a", [1], 8))
        assert "a" not in scene.submitted()
        scene.clock.advance_to(scene.clock.now() + 1.0)
        with pytest.raises(Refused) as caught:
            await asyncio.wait_for(anext(stream), 10)
        assert caught.value.outcome is Outcome.QUEUE_TIMEOUT
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    play(scenario)


def test_a_lost_worker_ends_what_had_begun_and_replays_what_had_not() -> None:
    async def scenario() -> None:
        scene = Scene()
        scene.ready()
        begun = scene.frontend.submit(make_request("begun", [1], 8))
        waiting = scene.frontend.submit(make_request("waiting", [1], 8))
        scene.report(scene.token("begun", 5))
        await anext(begun)
        scene.frontend.worker_lost("0", "worker 0 died")
        assert scene.frontend.health().reason == "no_workers"
        with pytest.raises(Refused) as caught:
            await anext(begun)
        assert caught.value.outcome is Outcome.WORKER_FAILED
        scene.worker.sent.clear()
        scene.ready(incarnation="j")
        assert scene.submitted() == ["waiting"]
        scene.report(scene.token("waiting", 1), incarnation="i")  # the dead worker's
        scene.report(scene.token("waiting", 2, FinishReason.LENGTH), incarnation="j")
        assert [output.token_ids for output in await anext(waiting)] == [[2]]

    play(scenario)


def test_health_is_stalled_when_there_is_work_and_no_step_for_too_long() -> None:
    async def scenario() -> None:
        scene = Scene(stall_timeout="5s")
        scene.ready()
        scene.clock.advance_to(100.0)
        assert scene.frontend.health().ready, "idle is not stalled"
        scene.frontend.submit(make_request("a", [1], 8))
        scene.clock.advance_to(104.0)
        assert scene.frontend.health().ready
        scene.clock.advance_to(106.0)
        assert scene.frontend.health().reason == "stalled"
        scene.report(scene.token("a", 5))
        assert scene.frontend.health().ready

    play(scenario)


def test_a_timeline_adds_up_and_can_be_asked_for_during_and_after_the_request() -> None:
    async def scenario() -> None:
        scene = Scene()
        scene.ready()
        request = make_request("a", [1, 2, 3], 8)
        request.arrival_s = 9.9
        stream = scene.frontend.submit(request)
        scene.frontend.record("a", tokenized_s=9.95)
        scene.clock.advance_to(11.0)
        output = scene.token("a", 5)
        output.prefill = PrefillTimes(10.1, 10.3, 10.9, 0.4, 0.2, 0)
        scene.report(output)
        during = scene.frontend.timeline("a")
        assert during is not None
        assert sum(during["ttft_parts_s"].values()) == pytest.approx(during["ttft_s"], abs=1e-5)
        assert during["ttft_s"] == pytest.approx(1.1)
        scene.frontend.record("a", first_byte_s=11.1)
        stream.close()
        scene.frontend.record("a", outcome=Outcome.STOP)
        after = scene.frontend.timeline("a")
        assert after is not None
        assert after["outcome"] == "stop"
        assert scene.frontend.timeline("nobody") is None

    play(scenario)


def test_stop_ends_what_is_left_and_the_worker() -> None:
    async def scenario() -> None:
        scene = Scene()
        scene.ready()
        stream = scene.frontend.submit(make_request("a", [1], 8))
        await scene.frontend.stop()
        with pytest.raises(Refused) as caught:
            await anext(stream)
        assert caught.value.outcome is Outcome.DRAINING
        assert scene.worker.is_stopped

    play(scenario)


def test_a_first_start_that_fails_is_a_config_error() -> None:
    async def scenario() -> None:
        scene = Scene()
        scene.frontend.worker_failed("0", "not enough memory")
        with pytest.raises(ConfigError, match="not enough memory"):
            await scene.frontend.first_worker()

    play(scenario)


def decisions(scene: Scene) -> dict[tuple[str, str, str], float]:
    """By (action, reason, tier)."""
    for family in scene.metrics.families():
        if family.name == "tidegate_admission":
            return {
                (one.labels["action"], one.labels["reason"], one.labels["tier"]): one.value for one in family.samples
            }
    raise AssertionError("no such metric")


def arriving(scene: Scene, request_id: str, prompt: list[int], max_tokens: int = 8, **changes: Any) -> Request:
    request = make_request(request_id, prompt, max_tokens, **changes)
    request.arrival_s = scene.clock.now()
    return request


def test_what_was_decided_is_counted_told_and_kept_with_the_timeline() -> None:
    async def scenario() -> None:
        scene = Scene(admission="on")
        scene.ready()
        stream = scene.frontend.submit(arriving(scene, "a", [1, 2, 3]))
        assert stream.served is not None
        assert stream.served.tier == "default"
        assert not stream.served.is_clamped
        assert stream.served.decision.startswith("admit; reason=fits; predicted_ttft_ms=")
        assert decisions(scene) == {("admit", "fits", "default"): 1}
        timeline = scene.frontend.timeline("a")
        assert timeline is not None
        assert timeline["decision"]["action"] == "admit"
        assert timeline["decision"]["predicted_ttft_ms"] > 0

    play(scenario)


def test_a_downgrade_tells_the_tier_and_the_length_that_are_served() -> None:
    async def scenario() -> None:
        tiers = {"default": TierConfig(max_prompt_tokens=2, downgrade=("clamp:4", "tier:flex"))}
        scene = Scene(admission="on")
        scene.frontend.reconfigure(Config(tiers=tiers))
        scene.ready()
        stream = scene.frontend.submit(arriving(scene, "a", [1, 2, 3]))
        assert stream.served is not None
        assert (stream.served.tier, stream.served.is_clamped) == ("default", True)
        assert stream.served.decision.startswith("downgrade; reason=long_prompt; changes=clamp:4; ")
        assert decisions(scene) == {("downgrade", "long_prompt", "default"): 1}

    play(scenario)


@pytest.mark.parametrize("admission", ["on", "observe"])
def test_a_refusal_carries_its_numbers_and_observing_lets_it_pass(admission: str) -> None:
    async def scenario() -> None:
        scene = Scene(admission=admission)
        scene.ready()
        scene.frontend.submit(arriving(scene, "first", [1] * 3000))  # so that more than its own length is in the way
        request = arriving(scene, "a", [1] * 2000, ttft_slo_s=0.1)
        if admission == "on":
            with pytest.raises(Refused) as caught:
                scene.frontend.submit(request)
            assert caught.value.outcome is Outcome.TTFT_UNREACHABLE
            header = dict(caught.value.headers())[b"x-tidegate-admission"]
            assert header.startswith(b"reject; reason=ttft_unreachable; predicted_ttft_ms=")
        else:
            stream = scene.frontend.submit(request)
            assert stream.served is not None
            assert stream.served.decision.startswith("observe; would=reject; reason=ttft_unreachable")
        assert decisions(scene)[("reject", "ttft_unreachable", "default")] == 1

    play(scenario)


def test_a_refusal_before_tokenizing_leaves_nothing_behind_and_counts() -> None:
    async def scenario() -> None:
        scene = Scene(admission="on")
        scene.ready()
        scene.frontend.refuse_early(arriving(scene, "fine", [0] * 10))
        scene.frontend.submit(arriving(scene, "first", [1] * 3000))
        sent_before = list(scene.worker.sent)
        with pytest.raises(Refused) as caught:
            scene.frontend.refuse_early(arriving(scene, "a", [0] * 2000, ttft_slo_s=0.1))
        assert caught.value.outcome is Outcome.TTFT_UNREACHABLE
        assert decisions(scene)[("reject", "ttft_unreachable", "default")] == 1
        assert scene.worker.sent == sent_before
        assert scene.frontend.timeline("a") is None

    play(scenario)


def test_predictions_are_judged_when_their_time_has_come() -> None:
    async def scenario() -> None:
        scene = Scene(admission="on")
        scene.ready()
        scene.frontend.submit(arriving(scene, "a", [1, 2, 3]))
        scene.clock.advance_to(scene.clock.now() + 0.5)
        scene.report(scene.token("a", 5))
        scene.clock.advance_to(scene.clock.now() + 0.1)
        scene.report(scene.token("a", 6, FinishReason.STOP))
        scene.frontend.record("a", outcome=Outcome.STOP)
        found = {
            (one.name, *one.labels.values()): one.value for family in scene.metrics.families() for one in family.samples
        }
        assert found["tidegate_ttft_prediction_error_ratio_count", "default"] == 1
        assert found["tidegate_ttft_actual_seconds_total", "default"] == pytest.approx(0.5)
        assert found["tidegate_tpot_actual_seconds_total", "default"] == pytest.approx(0.1)
        assert found["tidegate_output_length_p90_total", "default", "true"] == 1

    play(scenario)


def test_a_tier_that_is_no_longer_offered_is_a_mistake_of_the_client() -> None:
    async def scenario() -> None:
        scene = Scene(admission="on")
        scene.ready()
        assert scene.frontend.tier_names == ("priority", "default", "flex")
        with pytest.raises(Refused, match="allowed: priority, default, flex") as caught:
            scene.frontend.submit(arriving(scene, "a", [1], tier="gold"))
        assert caught.value.status == 400
        scene.frontend.reconfigure(Config(tiers={"gold": TierConfig()}))
        scene.frontend.submit(arriving(scene, "a", [1], tier="gold"))
        assert scene.submitted() == ["a"]

    play(scenario)

"""Real worker processes with the sim executor, started, killed and stopped by a real supervisor."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.engine_driver import make_request
from tidegate.config import Config, load_config
from tidegate.models.source import Architecture, ModelSource, TokenizerSource
from tidegate.request import FinishReason, RequestOutput
from tidegate.worker.messages import Cancel, StepReport, Submit, WorkerInfo
from tidegate.worker.spec import WorkerSpec
from tidegate.worker.supervisor import WorkerSupervisor

MODEL = ModelSource(
    name="shape",
    ir_path=Path("/nowhere/model.xml"),
    weight_digest="0" * 64,
    weight_format="none",
    architecture=Architecture("llama", 2, 4, 2, 32, 128, 1000, 512),
    tokenizer=TokenizerSource("gguf", Path("/nowhere/model.gguf")),
    chat_template=None,
    bos_token_id=1,
    eos_token_id=2,
    stop_token_ids=(2,),
)
WAIT_S = 20.0


class Witness:
    """A WorkerListener that keeps what it hears and can be waited on."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, Any]] = []
        self.outputs: list[RequestOutput] = []
        self._changed = asyncio.Event()

    def _hear(self, what: str, value: Any) -> None:
        self.heard.append((what, value))
        self._changed.set()

    def worker_loading(self, worker_id: str, message: str) -> None:
        self._hear("loading", message)

    def worker_ready(self, info: WorkerInfo) -> None:
        self._hear("ready", info)

    def worker_report(self, worker_id: str, report: StepReport) -> None:
        self.outputs += report.outputs
        self._changed.set()

    def worker_lost(self, worker_id: str, message: str) -> None:
        self._hear("lost", message)

    def worker_failed(self, worker_id: str, message: str) -> None:
        self._hear("failed", message)

    def count(self, what: str) -> int:
        return sum(one == what for one, _ in self.heard)

    async def wait_for(self, what: str, count: int = 1) -> Any:
        async with asyncio.timeout(WAIT_S):
            while self.count(what) < count:
                self._changed.clear()
                await self._changed.wait()
        return [value for one, value in self.heard if one == what][count - 1]

    async def wait_for_end(self, request_id: str) -> list[RequestOutput]:
        async with asyncio.timeout(WAIT_S):
            while True:
                mine = [output for output in self.outputs if output.request_id == request_id]
                if mine and mine[-1].finish_reason is not None:
                    return mine
                self._changed.clear()
                await self._changed.wait()


@asynccontextmanager
async def worker(**settings: Any) -> AsyncIterator[tuple[WorkerSupervisor, Witness]]:
    config: Config = load_config(None, {"executor": "sim", **settings})
    witness = Witness()
    supervisor = WorkerSupervisor("7", MODEL, config, witness)
    supervisor.start()
    try:
        yield supervisor, witness
    finally:
        await supervisor.stop()


def test_a_spec_survives_its_way_to_the_process() -> None:
    config = load_config(None, {"executor": "sim", "kv_memory": "64MiB"})
    spec = WorkerSpec(
        worker_id="1",
        incarnation="i",
        address="ipc:///x",
        parent_pid=1,
        config_json=config.model_dump_json(),
        model=MODEL,
    )
    again = WorkerSpec.decode(spec.encode())
    assert again == spec
    assert again.config == config


def test_a_worker_says_what_it_serves_and_serves_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    async def scenario() -> None:
        async with worker() as (supervisor, witness):
            info = await witness.wait_for("ready")
            assert witness.heard[0][0] == "loading"
            assert (info.worker_id, info.max_model_len, info.pid) == ("7", 512, supervisor.pid)
            assert list(tmp_path.iterdir()) == []
            command = psutil.Process(info.pid).cmdline()
            assert "tidegate-worker" in command
            supervisor.send(Submit(make_request("a", [1, 2, 3], 4)))
            outputs = await witness.wait_for_end("a")
            assert [len(output.token_ids) for output in outputs] == [1] * 4
            process = psutil.Process(info.pid)
        assert not process.is_running()

    asyncio.run(scenario())


def test_signals_meant_for_the_frontend_and_malformed_frames_do_not_disturb_a_worker() -> None:
    async def scenario() -> None:
        async with worker() as (supervisor, witness):
            # From the very first instant on.
            while supervisor.pid is None:
                await asyncio.sleep(0)
            os.kill(supervisor.pid, signal.SIGINT)
            info = await witness.wait_for("ready")
            os.kill(info.pid, signal.SIGTERM)
            os.kill(info.pid, signal.SIGINT)
            assert supervisor._link is not None
            for frame in (b"", b"\xff" * 50, b"\x81\xa4type\xa6Submit"):
                supervisor._link._socket.send(frame)
            supervisor.send(Submit(make_request("a", [1, 2, 3], 2)))
            outputs = await witness.wait_for_end("a")
            assert outputs[-1].finish_reason is FinishReason.LENGTH
            assert supervisor.pid == info.pid

    asyncio.run(scenario())


def test_a_cancel_ends_a_running_request() -> None:
    async def scenario() -> None:
        async with worker() as (supervisor, witness):
            await witness.wait_for("ready")
            supervisor.send(Submit(make_request("a", [1, 2, 3], 500)))
            supervisor.send(Cancel("a"))
            outputs = await witness.wait_for_end("a")
            assert outputs[-1].finish_reason is FinishReason.ABORT

    asyncio.run(scenario())


def test_a_killed_worker_is_reported_and_replaced_by_another_incarnation() -> None:
    async def scenario() -> None:
        async with worker() as (supervisor, witness):
            first = await witness.wait_for("ready")
            os.kill(first.pid, signal.SIGKILL)
            assert "SIGKILL" in await witness.wait_for("lost")
            second = await witness.wait_for("ready", 2)
            assert second.pid != first.pid
            assert second.incarnation != first.incarnation
            supervisor.send(Submit(make_request("a", [1, 2, 3], 2)))
            assert len(await witness.wait_for_end("a")) == 2
        assert witness.count("lost") == 1

    asyncio.run(scenario())


def test_a_worker_that_cannot_start_says_why_in_one_line_and_is_not_tried_again() -> None:
    async def scenario() -> None:
        async with worker(kv_memory="256KiB", max_model_len=512, kv_cache_dtype="f32") as (supervisor, witness):
            message = await witness.wait_for("failed")
            assert message == (
                "--max-model-len 512 does not fit the KV memory: it holds 256 tokens (8 blocks of 32); "
                "use --kv-memory 1MiB or more, or --max-model-len 256 or less"
            )
            assert supervisor._task is not None
            await asyncio.wait_for(supervisor._task, WAIT_S)
        assert witness.count("failed") == 1
        assert witness.count("ready") == 0

    asyncio.run(scenario())


def test_a_worker_killed_while_it_loads_is_a_failed_start() -> None:
    async def scenario() -> None:
        async with worker() as (supervisor, witness):
            while supervisor.pid is None:
                await asyncio.sleep(0)
            os.kill(supervisor.pid, signal.SIGKILL)
            assert "--kv-memory" in await witness.wait_for("failed")

    asyncio.run(scenario())


def test_stop_while_the_worker_loads_leaves_no_process() -> None:
    async def scenario() -> None:
        async with worker() as (supervisor, witness):
            while supervisor.pid is None:
                await asyncio.sleep(0)
            process = psutil.Process(supervisor.pid)
        assert not process.is_running()
        assert witness.count("failed") == witness.count("lost") == 0

    asyncio.run(scenario())

"""Target: one endpoint under test, from its first answer to the outcomes of a run.

    model name -> warm-up -> unloaded (when objectives are multiples) -> run -> outcomes

Owns: the order, and the event loop each part runs in. Every warm-up and every probe has a seed of its own, so that no
cache of the server helps the run that counts.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar

import msgspec

from tidegate.bench.body import RequestBodies
from tidegate.bench.client import Endpoint, call
from tidegate.bench.load import LoadGenerator, LoadOptions, LoadRun
from tidegate.bench.objectives import Unloaded, unloaded_probe
from tidegate.bench.outcome import Ending, Outcome
from tidegate.bench.score import Objectives
from tidegate.bench.workload import WorkItem, Workload, unloaded_items

_PROBE_TIMEOUT_S = 120.0
_NUM_WARM_UP_PER_CLASS = 2

T = TypeVar("T")


class TargetError(RuntimeError):
    """The endpoint cannot be measured; the message says why."""


class Target:
    def __init__(self, endpoint: Endpoint, workload: Workload, seed: str, *, model: str | None = None) -> None:
        """`seed` is for warm-up and probes, and is another one for each target."""
        self.endpoint = endpoint
        self._workload = workload
        self._seed = seed
        self._model = model
        self._num_probes = 0

    def prepare(self) -> None:
        """Find the model's name and send the first requests. Raises TargetError."""
        if self._model is None:
            self._model = run_in_loop(_served_model(self.endpoint))
        outcomes = self._probe(unloaded_items(self._workload, self._next_seed(), _NUM_WARM_UP_PER_CLASS))
        failed = [outcome for outcome in outcomes if outcome.ending is not Ending.COMPLETE]
        if len(failed) == len(outcomes):
            raise TargetError(f"{self.endpoint.name}: no warm-up request was answered: {failed[0].code}")

    def unloaded(self) -> Unloaded:
        """Raises TargetError when the idle server does not answer."""
        outcomes = self._probe(unloaded_probe(self._workload, self._next_seed()))
        unloaded = Unloaded.of(outcomes)
        missing = {one.name for one in self._workload.classes} - unloaded.ttft_s.keys()
        if missing:
            codes = sorted({outcome.code for outcome in outcomes if outcome.code})
            raise TargetError(f"{self.endpoint.name}: no answer for class {', '.join(sorted(missing))}: {codes}")
        return unloaded

    def run(
        self,
        items: Sequence[WorkItem],
        options: LoadOptions,
        objectives: Objectives | None,
        on_outcome: Callable[[Outcome], None] | None = None,
    ) -> LoadRun:
        """`objectives` given: they are sent along. After a Ctrl-C, what there is; the run is marked as interrupted."""
        bodies = RequestBodies(self._format, model=self._model or "default", objectives=objectives)
        generator = LoadGenerator(self.endpoint, items, bodies, options, on_outcome)
        try:
            run_in_loop(generator.send_all())
        except KeyboardInterrupt:
            generator.run.is_interrupted = True
        return generator.run

    @property
    def _format(self) -> Literal["tokens", "text", "chat"]:
        return self._workload.format

    def _next_seed(self) -> str:
        self._num_probes += 1
        return f"{self._seed} probe {self._num_probes}"

    def _probe(self, items: Sequence[WorkItem]) -> list[Outcome]:
        """One after another, in a closed loop of one client, and with nothing that a tier could change."""
        one_client = [replace(item, client=0, tier="", session_id="") for item in items]
        bodies = RequestBodies(self._format, model=self._model or "default")
        generator = LoadGenerator(self.endpoint, one_client, bodies, LoadOptions(timeout_s=_PROBE_TIMEOUT_S))
        return run_in_loop(generator.send_all()).outcomes


def run_in_loop(coroutine: Coroutine[Any, Any, T]) -> T:
    """On the faster event loop where it is there: the client must not be what is measured."""
    factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
    with contextlib.suppress(ImportError):
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(coroutine)


async def _served_model(endpoint: Endpoint) -> str:
    """The first of /v1/models. Raises TargetError."""
    record = await call(endpoint, endpoint.head("GET", "/v1/models", 0), timeout_s=_PROBE_TIMEOUT_S)
    if record.status != 200:
        why = record.error or f"status {record.status} from /v1/models"
        raise TargetError(f"{endpoint.name} at {endpoint.host}:{endpoint.port}: {why}")
    try:
        return str(msgspec.json.decode(record.body)["data"][0]["id"])
    except (msgspec.MsgspecError, KeyError, IndexError, TypeError):
        raise TargetError(f"{endpoint.name}: /v1/models names no model") from None

"""Generation: the Requests of one HTTP request while they run.

Owns: submitting them all or none, merging their output streams, and closing them once, whichever way it ends.
Never does: text or HTTP.
Invariant: after close() nothing of it runs anywhere, and iterating it ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from tidegate.api.service import Outcome, OutputStream, Refused, Served, Service
from tidegate.request import Request, RequestOutput

Batch = list[tuple[int, RequestOutput]]
"""Outputs that are there at one moment, each with the index of its Request."""


class Generation:
    def __init__(self, service: Service, requests: Sequence[Request], *, tokenized_s: float) -> None:
        """Raises Refused when any of them is refused; none runs then."""
        self._service = service
        self._requests = requests
        self._streams: list[OutputStream] = []
        self._is_recorded = False
        self.is_timed_out = False
        self._timer: asyncio.TimerHandle | None = None
        try:
            for request in requests:
                self._streams.append(service.submit(request))
                service.record(request.request_id, tokenized_s=tokenized_s)
        except Exception as error:
            self.finish(error.outcome if isinstance(error, Refused) else Outcome.ERROR)
            raise

    def end_after(self, seconds: float) -> None:
        """Close everything when this time has passed, and say so in `is_timed_out`."""
        self._timer = asyncio.get_running_loop().call_later(max(0.0, seconds), self._time_out)

    def _time_out(self) -> None:
        self.is_timed_out = True
        self.close()

    @property
    def served(self) -> list[Served | None]:
        """How each Request is served; final once it has an output."""
        return [stream.served for stream in self._streams]

    def batches(self) -> AsyncGenerator[Batch, None]:
        """All outputs in order, in as few batches as they allow. Raises Refused."""
        return self._single() if len(self._streams) == 1 else self._merged()

    async def _single(self) -> AsyncGenerator[Batch, None]:
        async for outputs in self._streams[0]:
            yield [(0, output) for output in outputs]

    async def _merged(self) -> AsyncGenerator[Batch, None]:
        arrived: Batch = []
        failures: list[Exception] = []
        wake = asyncio.Event()
        running = len(self._streams)

        async def pump(index: int, stream: OutputStream) -> None:
            nonlocal running
            try:
                async for outputs in stream:
                    arrived.extend((index, output) for output in outputs)
                    wake.set()
            except Exception as error:
                failures.append(error)
            finally:
                running -= 1
                wake.set()

        pumps = [asyncio.ensure_future(pump(index, stream)) for index, stream in enumerate(self._streams)]
        try:
            while running or arrived:
                if not arrived:
                    await wake.wait()
                wake.clear()
                if failures:
                    raise failures[0]
                batch, arrived[:] = list(arrived), []
                if batch:
                    yield batch
        finally:
            for task in pumps:
                task.cancel()

    def first_byte_sent(self, time_s: float) -> None:
        for request in self._requests:
            self._service.record(request.request_id, first_byte_s=time_s)

    def close_stream(self, index: int) -> None:
        """One Request needs no more outputs."""
        self._streams[index].close()

    def close(self) -> None:
        for stream in self._streams:
            stream.close()

    def finish(self, outcome: Outcome | Sequence[Outcome]) -> None:
        """The end, whichever it is: closes what is open and records the outcomes, the first time only."""
        self.close()
        if self._timer is not None:
            self._timer.cancel()
        if self._is_recorded:
            return
        self._is_recorded = True
        outcomes = [outcome] * len(self._requests) if isinstance(outcome, Outcome) else outcome
        for request, one in zip(self._requests, outcomes, strict=True):
            self._service.record(request.request_id, outcome=one)

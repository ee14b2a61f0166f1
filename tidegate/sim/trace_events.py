"""A file in the trace event format, which trace viewers open: what each worker did when, and each request's stages.

Each worker is a process with a lane for its steps (runs of equal decode steps are one span) and the requests it served,
from first token to end; the gate is a process where requests wait. Times in the file are microseconds.
"""

from __future__ import annotations

import json
from typing import Any

from tidegate.bench.outcome import Outcome
from tidegate.config import ConfigError
from tidegate.sim.simulator import SimOutcome

_GATE_PID = 0


class TraceEvents:
    """Collects while a simulation runs (StepRecorder, and on_outcome of SimClients)."""

    def __init__(self) -> None:
        self._events: list[dict[str, Any]] = []
        self._pids: dict[str, int] = {}
        self._name(_GATE_PID, "gate")

    def steps(self, worker_id: str, start_s: float, ends_s: list[float], num_prefill: int, num_rows: int) -> None:
        what = "decode" if not num_prefill else "prefill" if not num_rows else "mixed"
        self._events.append(
            {
                "ph": "X",
                "name": what if len(ends_s) == 1 else f"{what} x{len(ends_s)}",
                "cat": "step",
                "pid": self._pid(worker_id),
                "tid": 0,
                "ts": _us(start_s),
                "dur": _us(ends_s[-1]) - _us(start_s),
                "args": {"prefill_tokens": num_prefill, "decode_rows": num_rows, "steps": len(ends_s)},
            }
        )

    def request(self, outcome: Outcome, result: SimOutcome | None) -> None:
        """Nested spans on the worker: the whole stay, and its prefill and decode; the wait at the gate."""
        if result is None:
            return
        name = result.request.request_id
        args = {
            "ending": outcome.code or str(outcome.ending),
            "tenant": outcome.item.tenant,
            "tier": outcome.served_tier,
            "prompt_tokens": outcome.num_prompt_tokens,
            "cached_tokens": outcome.num_cached_tokens,
            "output_tokens": outcome.num_output_tokens,
        }
        sent_s, ended_s = result.request.arrival_s, outcome.ended_s
        left_gate_s = ended_s if result.dispatched_s is None else result.dispatched_s
        self._span(_GATE_PID, name, f"{name} waits", sent_s, left_gate_s, args)
        if result.dispatched_s is None:
            return
        pid = self._pid(result.worker_id)
        first_s = ended_s if result.first_token_s is None else result.first_token_s
        self._span(pid, name, name, result.dispatched_s, ended_s, args)
        self._span(pid, name, "to first token", result.dispatched_s, first_s, {})
        if first_s < ended_s:
            self._span(pid, name, "tokens", first_s, ended_s, {})

    def write(self, path: str) -> None:
        """Raises ConfigError."""
        try:
            with open(path, "w", encoding="utf-8") as file:
                json.dump({"displayTimeUnit": "ms", "traceEvents": self._events}, file, separators=(",", ":"))
                file.write("\n")
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from None

    def _span(self, pid: int, span_id: str, name: str, start_s: float, end_s: float, args: dict[str, Any]) -> None:
        common = {"name": name, "cat": "request", "id": span_id, "pid": pid, "tid": 1}
        self._events.append({"ph": "b", "ts": _us(start_s), "args": args, **common})
        self._events.append({"ph": "e", "ts": _us(end_s), **common})

    def _pid(self, worker_id: str) -> int:
        pid = self._pids.get(worker_id)
        if pid is None:
            pid = self._pids[worker_id] = len(self._pids) + 1
            self._name(pid, f"worker {worker_id}")
        return pid

    def _name(self, pid: int, name: str) -> None:
        self._events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}})
        self._events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": 0, "args": {"name": "steps"}})


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)

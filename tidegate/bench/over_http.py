"""`tidegate bench http`: what is left of the engine's rate when every token goes to a client over HTTP.

The fixed work, 16 at a time: through our engine in this process, and streamed by a real `tidegate serve` to a client
that sends the next request when an answer has ended. Alternating pairs; the ratio is the median of HTTP / offline.
Client, frontend and worker share the machine's cores.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

import msgspec

from tidegate.bench.client import CallRecord, Endpoint, call
from tidegate.bench.fixed_work import FedLoop, FixedWork, fixed_work, warm_up_work
from tidegate.bench.machine import describe_machine, machine_line
from tidegate.bench.report import check_writable, console_for, plain_table, write_json
from tidegate.bench.server_process import ServerProcess
from tidegate.config import load_config
from tidegate.models.load import resolve_model
from tidegate.worker.build import build_engine, build_executor
from tidegate.worker.loop import settle_garbage_collection

NUM_PAIRS = 3
NUM_AT_ONCE = 16
MIN_RATIO = 0.9


def run(json_path: str | None = None, *, num_pairs: int = NUM_PAIRS, num_requests: int = 48) -> int:
    """Returns the exit code: 1 when too much is lost on the way."""
    check_writable(json_path)
    console = console_for(json_path)
    machine = describe_machine()
    console.print(machine_line(machine), soft_wrap=True)
    config = load_config(None, {"enable_prefix_caching": False, "max_num_seqs": NUM_AT_ONCE})
    with console.status("loading") as status:
        executor = build_executor(resolve_model(config.model.model), config)
        offline = FedLoop(build_engine(executor, config), executor)
        settle_garbage_collection()
        work = fixed_work(executor.info.vocab_size)[:num_requests]
        warm_up = warm_up_work(executor.info.vocab_size)
        pairs = []
        # Nothing is refused or slowed down for an objective: what is compared is the way to the engine.
        plain = ["--no-enable-prefix-caching", "--admission", "off", "--step", "fixed"]
        with ServerProcess([*plain, "--max-num-seqs", str(NUM_AT_ONCE)]) as endpoint:
            status.update("warm-up")
            offline.run(warm_up)
            asyncio.run(_run_over_http(endpoint, warm_up))
            for place in range(num_pairs):
                status.update(f"pair {place + 1} of {num_pairs}")
                pairs.append(_pair(offline, endpoint, work, http_first=place % 2 == 1))
    ratio = median(pair["ratio"] for pair in pairs)
    rows = [
        (
            f"pair {place}",
            f"{pair['offline']['tok_s']:.1f}",
            f"{pair['http']['tok_s']:.1f}",
            f"{pair['http']['ttft_p50_ms']:.0f}",
            f"{pair['ratio']:.3f}",
        )
        for place, pair in enumerate(pairs, start=1)
    ]
    headings = ("", "offline tok/s", "HTTP tok/s", "TTFT P50 ms", "ratio")
    console.print(plain_table(f"{len(work)} requests, {NUM_AT_ONCE} at a time, streamed", headings, rows))
    console.print(f"median ratio [bold]{ratio:.3f}[/bold]")
    write_json({"ratio": round(ratio, 4), "pairs": pairs, "machine": machine}, json_path)
    return 0 if ratio >= MIN_RATIO else 1


def _pair(offline: FedLoop, endpoint: Endpoint, work: Sequence[FixedWork], *, http_first: bool) -> dict[str, Any]:
    http = asyncio.run(_run_over_http(endpoint, work)) if http_first else None
    ours = offline.run(work).figures()
    http = http or asyncio.run(_run_over_http(endpoint, work))
    return {"offline": ours, "http": http, "ratio": round(http["tok_s"] / ours["tok_s"], 4)}


async def _run_over_http(endpoint: Endpoint, work: Sequence[FixedWork]) -> dict[str, float]:
    """Raises RuntimeError when an answer is not what was asked for."""
    records: list[CallRecord] = []
    requests = iter([(item, _request(endpoint, item)) for item in work])
    start_s = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for _ in range(NUM_AT_ONCE):
            group.create_task(_client(endpoint, requests, records))
    wall_s = max(record.ended_s for record in records) - start_s
    num_tokens = sum(record.num_output_tokens for record in records)
    return {
        "tok_s": round(num_tokens / wall_s, 2),
        "wall_s": round(wall_s, 3),
        "ttft_p50_ms": round(median(record.event_times[0] - record.sent_s for record in records) * 1e3, 2),
        "output_tokens": num_tokens,
    }


async def _client(endpoint: Endpoint, requests: Iterator[tuple[FixedWork, bytes]], records: list[CallRecord]) -> None:
    for item, request in requests:
        record = await call(endpoint, request)
        if not record.is_complete or record.num_output_tokens != item.num_output_tokens:
            raise RuntimeError(
                f"status {record.status}, {record.num_output_tokens} of {item.num_output_tokens} tokens: "
                f"{record.error or record.body[:200]!r}"
            )
        records.append(record)


def _request(endpoint: Endpoint, item: FixedWork) -> bytes:
    body = msgspec.json.encode(
        {
            "model": "default",
            "prompt": item.prompt_token_ids,
            "max_tokens": item.num_output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )
    return endpoint.head("POST", "/v1/completions", len(body)) + body

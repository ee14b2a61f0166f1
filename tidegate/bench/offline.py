"""`tidegate bench offline`: our engine against OpenVINO GenAI's continuous batching, same kernels and same work.

Five alternating pairs (who goes first alternates too) at 16 at a time and at 1; a ratio is the median over pairs, since
the same work repeated varies by several percent on a small machine. What is lost against the reference is ours: it has
the same kernels, without a scheduler in Python. One process runs both, one at a time; the other's threads sleep.

JSON: {"at_16": PART, "at_1": PART}. A PART's `ratio` is ours / theirs in output tokens per second; `tpot_ratio` is
ours / theirs in median time per output token, so below 1 is better there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

from rich.console import Console

from tidegate.bench.fixed_work import ONE_AT_A_TIME_EVERY, FedLoop, FixedWork, WorkRun, fixed_work, warm_up_work
from tidegate.bench.machine import describe_machine, machine_line
from tidegate.bench.reference import ReferencePipeline
from tidegate.bench.report import check_writable, console_for, paired_ratio, plain_table, write_json
from tidegate.config import load_config
from tidegate.executor.base import Executor
from tidegate.models.load import resolve_model
from tidegate.worker.build import build_engine, build_executor
from tidegate.worker.loop import settle_garbage_collection

NUM_PAIRS = 5
_PARTS = (16, 1)
_MIN_PAIRS = 3
_PART_TIME_S = 168.0
"""Time for a part's pairs, so that both fit in six minutes. A machine too slow for five pairs runs fewer, and says so.
"""


def run(only: int | None = None, json_path: str | None = None, *, num_pairs: int = NUM_PAIRS, model: str = "") -> int:
    """Returns the exit code. Raises ConfigError when the model or the result's path is no good."""
    check_writable(json_path)
    console = console_for(json_path)
    settings = {"enable_prefix_caching": False, "model": model or None}
    config = load_config(None, settings)
    source = resolve_model(config.model.model)
    machine = describe_machine()
    console.print(machine_line(machine), soft_wrap=True)
    with console.status("loading both"):
        executor = build_executor(source, config)
        reference = ReferencePipeline(source, executor.info, config)
    settle_garbage_collection()
    work, warm_up = fixed_work(executor.info.vocab_size), warm_up_work(executor.info.vocab_size)
    document: dict[str, Any] = {}
    for num_at_once in _PARTS if only is None else (only,):
        part_work = work if num_at_once > 1 else work[::ONE_AT_A_TIME_EVERY]
        ours = FedLoop(build_engine(executor, load_config(None, {**settings, "max_num_seqs": num_at_once})), executor)
        pairs = _run_pairs(
            ours.run,
            partial(reference.run, num_at_once=num_at_once),
            part_work,
            warm_up,
            num_pairs,
            console,
            f"{num_at_once} at a time",
        )
        part = _part(pairs, executor, num_at_once, len(part_work))
        document[f"at_{num_at_once}"] = part | {"machine": machine}
        _print_part(console, num_at_once, part)
    write_json(document, json_path)
    return 0


def _run_pairs(
    ours: Callable[[Sequence[FixedWork]], WorkRun],
    theirs: Callable[[Sequence[FixedWork]], WorkRun],
    work: Sequence[FixedWork],
    warm_up: Sequence[FixedWork],
    num_pairs: int,
    console: Console,
    title: str,
) -> list[tuple[WorkRun, WorkRun]]:
    pairs: list[tuple[WorkRun, WorkRun]] = []
    with console.status(f"{title}: warm-up") as status:
        ours(warm_up)
        theirs(warm_up)
        spent_s = 0.0
        for place in range(num_pairs):
            if place >= _MIN_PAIRS and spent_s * (place + 1) / place > _PART_TIME_S:
                console.print(f"[yellow]{title}: {place} pairs; this machine is too slow for {num_pairs}[/yellow]")
                break
            status.update(f"{title}: pair {place + 1} of {num_pairs}")
            if place % 2 == 0:
                our_run = ours(work)
                their_run = theirs(work)
            else:
                their_run = theirs(work)
                our_run = ours(work)
            pairs.append((our_run, their_run))
            spent_s += our_run.wall_s + their_run.wall_s
    return pairs


def _part(runs: Sequence[tuple[WorkRun, WorkRun]], executor: Executor, num_at_once: int, num: int) -> dict[str, Any]:
    pairs = [_pair(ours.figures(), theirs.figures()) for ours, theirs in runs]
    return {
        "ratio": paired_ratio(pairs, "tok_s"),
        "tpot_ratio": paired_ratio(pairs, "tpot_ms"),
        "steps_ratio": paired_ratio(pairs, "steps"),
        "busy_share": round(median(pair["ours"]["busy_share"] for pair in pairs), 4),
        "same_tokens": _same_tokens(*runs[0]),
        "ours": _medians(pairs, "ours"),
        "theirs": _medians(pairs, "theirs"),
        "pairs": pairs,
        "num_requests": num,
        "num_at_once": num_at_once,
        "kv_blocks": executor.num_blocks,
        "precision": {
            "weights": executor.info.weight_format,
            "kv": executor.info.kv_cache_dtype,
            "compute": executor.info.compute_dtype,
        },
    }


def _pair(ours: dict[str, float], theirs: dict[str, float]) -> dict[str, Any]:
    return {"ratio": round(ours["tok_s"] / theirs["tok_s"], 4), "ours": ours, "theirs": theirs}


def _medians(pairs: Sequence[dict[str, Any]], side: str) -> dict[str, float]:
    return {name: round(median(pair[side][name] for pair in pairs), 4) for name in pairs[0][side]}


def _same_tokens(ours: WorkRun, theirs: WorkRun) -> float:
    """The share of answers that are equal token for token: in reduced precision most, not all, are."""
    pairs = zip(ours.answers, theirs.answers, strict=True)
    return round(sum(a.token_ids == b.token_ids for a, b in pairs) / len(ours.answers), 3)


def _print_part(console: Console, num_at_once: int, part: dict[str, Any]) -> None:
    rows = [
        (f"pair {place}", *_row(pair["ours"], pair["theirs"]), f"{pair['ratio']:.3f}")
        for place, pair in enumerate(part["pairs"], start=1)
    ]
    rows.append(("median", *_row(part["ours"], part["theirs"]), f"[bold]{part['ratio']:.3f}[/bold]"))
    headings = ("", "tok/s", "reference", "TPOT ms", "reference", "steps", "reference", "ratio")
    console.print(plain_table(f"{part['num_requests']} requests, {num_at_once} at a time", headings, rows))
    console.print(
        f"TPOT ratio {part['tpot_ratio']:.3f}, executor busy {part['busy_share']:.1%} of the loop, "
        f"{part['same_tokens']:.0%} of the answers equal\n"
    )


def _row(ours: dict[str, float], theirs: dict[str, float]) -> tuple[str, ...]:
    return (
        f"{ours['tok_s']:.1f}", f"{theirs['tok_s']:.1f}",
        f"{ours['tpot_ms']:.2f}", f"{theirs['tpot_ms']:.2f}",
        f"{ours['steps']:.0f}", f"{theirs['steps']:.0f}",
    )  # fmt: skip

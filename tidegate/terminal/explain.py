"""A request's timeline, as bars: where its time went, and the main cause of its time to first token.

Takes the JSON that a server gives for GET /debug/requests/ID (Timeline.as_dict), and prints it. Judges nothing.
"""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

_BAR_WIDTH = 48
_STYLES = {
    "tokenize": "cyan",
    "gate wait": "yellow",
    "dispatch": "magenta",
    "batch wait": "yellow",
    "own prefill": "green",
    "interference": "red",
    "answer": "blue",
}


def print_timeline(timeline: dict[str, Any], *, console: Console | None = None) -> None:
    console = console or Console(highlight=False)
    console.print(_headline(timeline), markup=False)
    console.print(_bars(timeline))
    for line in _figures(timeline):
        console.print(line, markup=False)


def _headline(timeline: dict[str, Any]) -> str:
    cached = f" ({timeline['cached_tokens']} cached)" if timeline["cached_tokens"] else ""
    return (
        f"{timeline['request_id']}: {timeline['outcome'] or 'under way'}; tier {timeline['tier']}; "
        f"{timeline['prompt_tokens']} prompt tokens{cached}, {timeline['output_tokens']} output tokens"
    )


def spans(timeline: dict[str, Any]) -> list[tuple[str, float, float]]:
    """(stage, start, length) in seconds since the request was received.

    Own prefill and interference alternate step by step; they are drawn one after the other. The way back from the
    worker is drawn with the way there, as `dispatch`.
    """
    stages: list[tuple[str, float, float]] = []
    start_s = 0.0
    parts = timeline["ttft_parts_s"]
    milestones = timeline["milestones_s"]
    if parts is None:
        names = {"tokenized": "tokenize", "dispatched": "gate wait"}
        for milestone, stage in names.items():
            end_s = milestones[milestone]
            if end_s is not None:
                stages.append((stage, start_s, end_s - start_s))
                start_s = end_s
        end_s = milestones["finished"] if milestones["finished"] is not None else timeline["age_s"]
        if end_s is not None and end_s > start_s:
            stages.append((str(timeline["main_cause"]), start_s, end_s - start_s))
        return stages
    for name, length_s in parts.items():
        stages.append((name.replace("_", " "), start_s, length_s))
        start_s += length_s
    end_s = milestones["last_token"]
    if end_s is not None and end_s > start_s:
        stages.append(("answer", start_s, end_s - start_s))
    return stages


def _bars(timeline: dict[str, Any]) -> Table:
    stages = spans(timeline)
    total_s = max((start_s + length_s for _, start_s, length_s in stages), default=0.0) or 1.0
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(width=_BAR_WIDTH, no_wrap=True)
    for name, start_s, length_s in stages:
        indent = round(start_s / total_s * _BAR_WIDTH)
        width = round((start_s + length_s) / total_s * _BAR_WIDTH) - indent
        bar = "█" * width if width > 0 else "▏"
        table.add_row(name, _duration(length_s), Text(" " * min(indent, _BAR_WIDTH - 1) + bar, _STYLES.get(name, "")))
    return table


def _figures(timeline: dict[str, Any]) -> list[str]:
    cause = timeline["main_cause"]
    if timeline["ttft_s"] is None:
        return [f"no first token; most of the time went to: {cause}"]
    lines = [f"TTFT {_duration(timeline['ttft_s'])}, most of it: {cause}"]
    if timeline["tpot_s"] is not None:
        lines.append(
            f"TPOT {_duration(timeline['tpot_s'])}; between tokens P50 {_duration(timeline['itl_p50_s'])}, "
            f"P99 {_duration(timeline['itl_p99_s'])}, longest {_duration(timeline['itl_max_s'])}"
        )
    if timeline["preemptions"]:
        lines.append(f"preempted {timeline['preemptions']} times")
    if timeline["e2e_s"] is not None:
        lines.append(f"E2E {_duration(timeline['e2e_s'])}")
    return lines


def _duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1.0 else f"{seconds * 1e3:.1f} ms"

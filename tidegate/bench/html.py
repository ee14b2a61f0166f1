"""The report as one self-contained HTML file: charts of latency, goodput over load and what ran when, and the tables.

It loads nothing and runs nothing, so it can be mailed, archived and printed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from tidegate.bench.machine import machine_line
from tidegate.bench.outcome import Ending, Outcome
from tidegate.bench.report import write_text
from tidegate.bench.svg import Chart, Line, Point

if TYPE_CHECKING:
    from tidegate.bench.serve import Measured

_MAX_POINTS = 300
_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:1180px;margin:2em auto;padding:0 1em;color:#111;background:#fff}
h1{font-size:1.5em;margin-bottom:0}h2{font-size:1.15em;margin-top:2em}p.machine{color:#555;margin-top:.2em}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(430px,1fr));gap:1em}
figure{margin:0;border:1px solid #ddd;border-radius:6px;padding:8px;break-inside:avoid}
svg{width:100%;height:auto;font-family:system-ui,sans-serif}
svg .title{font-size:14px;font-weight:600}svg .label{font-size:12px}svg .small{font-size:11px;fill:#333}
svg .middle{text-anchor:middle}svg .end{text-anchor:end}svg .grid{stroke:#e4e4e4}
svg .axis{stroke:#333;fill:none}svg .line{fill:none;stroke-width:2}svg .mark{stroke:#777;stroke-dasharray:3 3}
table{border-collapse:collapse;margin:.6em 0}td,th{padding:3px 12px;text-align:right;border-bottom:1px solid #e4e4e4}
td:first-child,th:first-child{text-align:left;padding-left:0}
"""


def write_report(
    path: str,
    title: str,
    machine: dict[str, object],
    runs: Sequence[Measured],
    sweeps: Sequence[tuple[str, Sequence[Measured]]],
) -> None:
    """`runs`: one a server, compared in detail. `sweeps`: a server's runs over load. Raises ConfigError."""
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="machine">{escape(machine_line(machine))}</p>',
    ]
    if sweeps:
        parts += ["<h2>Goodput over load</h2>", _figures(_sweep_charts(sweeps)), _sweep_table(sweeps)]
    if runs:
        names = ", ".join(run.name for run in runs)
        parts += [f"<h2>{escape(names)} at {runs[0].rate:g} requests/s</h2>", _run_table(runs)]
        parts += ["<h2>Latency</h2>", _figures(_latency_charts(runs))]
        parts += ["<h2>What ran when</h2>", _figures([_activity_chart(run) for run in runs])]
    body = "\n".join(parts)
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
    write_text(path, f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n')


def _figures(charts: Sequence[Chart]) -> str:
    return '<div class="charts">' + "".join(f"<figure>{chart.svg()}</figure>" for chart in charts) + "</div>"


# Goodput over load.


def _sweep_charts(sweeps: Sequence[tuple[str, Sequence[Measured]]]) -> list[Chart]:
    def lines(value_of: Callable[[dict[str, Any]], float]) -> list[Line]:
        return [
            Line(name, [(run.rate, value_of(run.figures)) for run in runs], has_markers=True) for name, runs in sweeps
        ]

    x_label = "offered load, requests/s"
    return [
        Chart("Goodput", x_label, "good requests/s", [*lines(lambda f: f["goodput_s"]), _offered(sweeps)]),
        Chart("Token goodput", x_label, "output tokens/s of good requests", lines(lambda f: f["token_goodput_s"])),
        Chart("Share of requests that were good", x_label, "%", lines(lambda f: 100 * f["attainment"]), y_max=105.0),
        Chart("TTFT P99 of what was answered", x_label, "ms", lines(lambda f: f["latency"]["ttft_ms"].get("p99", 0.0))),
    ]


def _offered(sweeps: Sequence[tuple[str, Sequence[Measured]]]) -> Line:
    """What goodput would be if every request were good; cut off where it would squeeze the rest."""
    best = max(run.figures["goodput_s"] for _, runs in sweeps for run in runs)
    rates = [run.figures["sent"] / run.figures["window_s"] for _, runs in sweeps for run in runs]
    highest = min(max(rates), 1.3 * best) if best else max(rates)
    return Line("all that was offered", [(0.0, 0.0), (highest, highest)])


def _sweep_table(sweeps: Sequence[tuple[str, Sequence[Measured]]]) -> str:
    rows = [
        (
            name,
            f"{run.rate:.3g}",
            f"{run.figures['goodput_s']:.3f}",
            f"{run.figures['attainment']:.1%}",
            f"{run.figures['token_goodput_s']:.1f}",
            *(str(run.figures["outcomes"].get(verdict, 0)) for verdict in ("late", "downgraded", "refused")),
        )
        for name, runs in sweeps
        for run in runs
    ]
    return _table(("", "offered/s", "good/s", "attained", "tok/s good", "late", "downgraded", "refused"), rows)


# Servers side by side.


def _run_table(runs: Sequence[Measured]) -> str:
    rows = []
    for run in runs:
        latency = run.figures["latency"]
        rows.append(
            (
                run.name,
                str(run.figures["sent"]),
                f"{run.figures['goodput_s']:.3f}",
                f"{run.figures['attainment']:.1%}",
                f"{run.figures['throughput']['output_tokens_s']:.1f}",
                *(
                    f"{latency[key].get(column, 0.0):.1f}"
                    for key in ("ttft_ms", "tpot_ms")
                    for column in ("p50", "p99")
                ),
                ", ".join(f"{count} {verdict}" for verdict, count in run.figures["outcomes"].items()),
            )
        )
    headings = ("", "sent", "good/s", "attained", "tok/s", "TTFT P50 ms", "P99", "TPOT P50 ms", "P99", "outcomes")
    return _table(headings, rows)


def _latency_charts(runs: Sequence[Measured]) -> list[Chart]:
    kinds: tuple[tuple[str, str, Callable[[Outcome], float | None]], ...] = (
        ("Time to first token", "ttft_ms", lambda outcome: outcome.ttft_s),
        ("Time per output token", "tpot_ms", lambda outcome: outcome.tpot_s),
        ("Whole request", "", lambda outcome: outcome.e2e_s if outcome.token_times else None),
    )
    charts = []
    for title, objective, value_of in kinds:
        lines = [Line(run.name, _cdf([value_of(outcome) for outcome in run.outcomes])) for run in runs]
        marks = _marks(runs[0].figures["objectives"].get(objective, {}))
        charts.append(Chart(title, "ms (logarithmic)", "% of answers at most", lines, True, 102.0, marks))
    return charts


def _marks(objectives: dict[str, float]) -> list[tuple[float, str]]:
    """One a value; classes that share it share the label."""
    values = sorted(set(objectives.values()))
    names = [", ".join(name for name, ms in objectives.items() if ms == value) for value in values]
    return [(value, f"objective {name}") for value, name in zip(values, names, strict=True)]


def _cdf(seconds: Sequence[float | None]) -> list[Point]:
    ordered = sorted(value * 1e3 for value in seconds if value is not None)
    num = len(ordered)
    stride = max(1, num // _MAX_POINTS)
    places = sorted({*range(0, num, stride), num - 1} if num else set())
    return [(max(ordered[place], 1e-3), 100.0 * (place + 1) / num) for place in places]


def _activity_chart(run: Measured) -> Chart:
    """From the client's side: sent without a token yet, and being answered."""
    waiting: list[tuple[float, int]] = []
    running: list[tuple[float, int]] = []
    for outcome in run.outcomes:
        if outcome.ending is Ending.UNSENT:
            continue
        first_s = outcome.token_times[0] if outcome.token_times else outcome.ended_s
        waiting += [(outcome.arrival_s, 1), (first_s, -1)]
        running += [(first_s, 1), (outcome.ended_s, -1)] if outcome.token_times else []
    lines = [Line("waiting for a first token", _steps(waiting), is_step=True)]
    lines.append(Line("being answered", _steps(running), is_step=True))
    return Chart(f"{run.name}: requests over time", "s from the start", "requests", lines)


def _steps(events: list[tuple[float, int]]) -> list[Point]:
    """A running count, thinned out to what a chart can show (the highest of each bin is kept)."""
    if not events:
        return []
    bins: dict[int, int] = {}
    width_s = max(time_s for time_s, _ in events) / _MAX_POINTS or 1.0
    count = 0
    for time_s, change in sorted(events):
        count += change
        place = int(time_s / width_s)
        bins[place] = max(bins.get(place, 0), count)
    return [(0.0, 0.0), *((place * width_s, float(count)) for place, count in sorted(bins.items()))]


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    lines = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{lines}</table>"

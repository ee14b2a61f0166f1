"""The tables that `bench serve` and `bench sweep` print."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console

from tidegate.bench.report import plain_table

_LATENCIES = (("TTFT", "ttft_ms"), ("TPOT", "tpot_ms"), ("ITL", "itl_ms"), ("E2E", "e2e_ms"))
_COLUMNS = ("mean", "p50", "p90", "p95", "p99", "max")
_GROUP_COLUMNS = ("sent", "good", "attained", "good/s", "tok/s good", "TTFT P50", "P99", "TPOT P50", "P99")

Figures = dict[str, Any]


def print_details(console: Console, name: str, figures: Figures) -> None:
    """Everything about one server."""
    outcomes = ", ".join(f"{count} {verdict}" for verdict, count in figures["outcomes"].items())
    console.print(f"\n[bold]{name}[/bold]: {figures['sent']} requests: {outcomes}", soft_wrap=True)
    if figures.get("is_interrupted"):
        console.print("[yellow]interrupted: requests still in flight are left out[/yellow]")
    rows = [
        (title, *(_number(figures["latency"][key].get(column)) for column in _COLUMNS)) for title, key in _LATENCIES
    ]
    console.print(plain_table("Latency, ms", ("", *_COLUMNS), rows))
    for title, key in (("Class", "by_class"), ("Tier", "by_tier"), ("Tenant", "by_tenant")):
        if len(figures[key]) > 1:
            console.print(
                plain_table("", (title, *_GROUP_COLUMNS), [_group_row(*item) for item in figures[key].items()])
            )
    _print_rest(console, figures)


def _group_row(name: str, group: Figures) -> tuple[str, ...]:
    ttft, tpot = group["ttft_ms"], group["tpot_ms"]
    return (
        name,
        str(group["sent"]),
        str(group["outcomes"].get("good", 0)),
        f"{group['attainment']:.1%}",
        f"{group['goodput_s']:.2f}",
        f"{group['token_goodput_s']:.1f}",
        *(_number(values.get(column)) for values in (ttft, tpot) for column in ("p50", "p99")),
    )


def _print_rest(console: Console, figures: Figures) -> None:
    lines = []
    if figures["refusals"]["time_ms"]:
        codes = ", ".join(
            f"{code} {one['count']} (P99 {one['time_ms']['p99']:.0f} ms)"
            for code, one in figures["refusals"]["by_code"].items()
        )
        lines.append(f"refused after P50 {figures['refusals']['time_ms']['p50']:.1f} ms: {codes}")
    if figures["refusals"]["other_codes"]:
        codes = ", ".join(f"{count} x {code}" for code, count in figures["refusals"]["other_codes"].items())
        lines.append(f"not served: {codes}")
    if figures["prefix"]["cached_tokens"]:
        lines.append(f"prompt tokens from the server's cache: {figures['prefix']['hit_ratio']:.1%}")
    if figures["fairness"]:
        lines.append(
            f"fairness between tenants: Jain {figures['fairness']['jain']:.3f}, "
            f"widest service gap {figures['fairness']['max_service_gap_tokens']:,.0f} tokens"
        )
    if figures["prediction"]:
        error = figures["prediction"]
        lines.append(f"TTFT predicted within {error['p50']:.0%} (P50), {error['p90']:.0%} (P90)")
    if "client" in figures:  # a simulated one is never late
        lines.append(_client_line(figures["client"]))
    if lines:
        console.print("\n".join(lines), soft_wrap=True)


def _client_line(client: Figures) -> str:
    lag = (
        f"client: sends {client['send_lag_ms']['p99']:.1f} ms late, reads {client['loop_delay_ms']['p99']:.1f} ms (P99)"
    )
    if client["is_bottleneck"]:
        lag = f"[yellow]{lag}: it was too slow, do not trust the latencies[/yellow]"
    return lag


def print_comparison(console: Console, servers: Sequence[tuple[str, Figures]]) -> None:
    """One row a server; with several, the goodput's ratio to the first."""
    first = servers[0][1]
    headings = ["", "good/s", "attained", "tok/s good", "tok/s", "TTFT P50", "P99", "TPOT P50", "P99", "refused"]
    rows = []
    for name, figures in servers:
        ttft, tpot = figures["latency"]["ttft_ms"], figures["latency"]["tpot_ms"]
        row = [
            name,
            f"{figures['goodput_s']:.2f}",
            f"{figures['attainment']:.1%}",
            f"{figures['token_goodput_s']:.1f}",
            f"{figures['throughput']['output_tokens_s']:.1f}",
            *(_number(values.get(column)) for values in (ttft, tpot) for column in ("p50", "p99")),
            str(figures["outcomes"].get("refused", 0)),
        ]
        if len(servers) > 1:
            row.append(_ratio(figures["goodput_s"], first["goodput_s"]))
            row.append(_ratio(figures["throughput"]["output_tokens_s"], first["throughput"]["output_tokens_s"]))
        rows.append(row)
    if len(servers) > 1:
        headings += ["goodput ratio", "tok/s ratio"]
    console.print(plain_table("", headings, rows))


def _ratio(value: float, base: float) -> str:
    return f"{value / base:.2f}" if base else "-"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1_000 else f"{value:.1f}"

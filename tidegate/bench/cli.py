"""`tidegate bench ...`: the command line of the benchmarks. Every command imports what it runs when it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from tidegate.bench.trace_cli import (
    ScaleLengthOption,
    ScaleTimeOption,
    SkipBadOption,
    TenantsOption,
    TraceOption,
    WindowOption,
)
from tidegate.config import ConfigError, parse_duration

app = typer.Typer(help="How fast it is here, and how much load it takes.", no_args_is_help=True)

JsonOption = Annotated[
    str | None, typer.Option("--json", help="Write JSON to this file; - prints it.", metavar="PATH|-")
]


@app.command()
def offline(
    only: Annotated[
        int | None, typer.Option("--only", help="Run one part: 16 at a time, or 1; default: both.", metavar="16|1")
    ] = None,
    json_path: JsonOption = None,
) -> None:
    """The engine against OpenVINO GenAI's continuous batching, same model and work, in alternating pairs."""
    if only not in (None, 1, 16):
        raise ConfigError(f"--only takes 16 or 1, not {only}")
    from tidegate.bench.offline import run

    raise typer.Exit(run(only=only, json_path=json_path))


@app.command()
def quality(
    json_path: JsonOption = None,
    model: Annotated[str, typer.Option("--model", help="Catalog name or GGUF file.")] = "smollm2-135m",
) -> None:
    """Perplexity, size and speed of each KV precision and weight format. About three minutes."""
    from tidegate.bench.quality import run

    raise typer.Exit(run(json_path, model))


@app.command()
def scheduler(json_path: JsonOption = None) -> None:
    """The scheduler alone: schedule and apply of a step, up to 1,000 running and 10,000 waiting."""
    from tidegate.bench.scheduler import run

    raise typer.Exit(run(json_path))


@app.command()
def admission(json_path: JsonOption = None) -> None:
    """A decision at the gate alone, with 1,000 requests waiting."""
    from tidegate.bench.admission import run

    raise typer.Exit(run(json_path))


@app.command(name="admission-sim")
def admission_sim(
    profile: Annotated[
        str, typer.Option("--profile", help="What the machine can do: a name, or a TOML file.", metavar="NAME|FILE")
    ] = "cpu-2core-smollm2",
    workload: Annotated[
        str | None, typer.Option("--workload", help="One mix only; default: uniform and heavy.", metavar="NAME|FILE")
    ] = None,
    duration: Annotated[
        str, typer.Option("--duration", help="Simulated time in which requests arrive, of each run.")
    ] = "300s",
    seed: Annotated[int, typer.Option("--seed", help="Another seed is other work of the same kind.")] = 0,
    json_path: JsonOption = None,
) -> None:
    """Admission in simulated time: goodput over load with the gate on, off and capped, predictions, refusals, tiers."""
    from tidegate.bench.admission_sim import MIXES, AdmissionOptions, run

    mixes = MIXES if workload is None else (workload,)
    raise typer.Exit(run(AdmissionOptions(profile, mixes, seconds(duration, "--duration"), seed, json_path)))


@app.command()
def tenants(json_path: JsonOption = None) -> None:
    """What tenants do to each other, simulated; and a decision's cost with 1,000 of them. About half a minute."""
    from tidegate.bench.tenants import run

    raise typer.Exit(run(json_path))


@app.command()
def prefix(json_path: JsonOption = None) -> None:
    """Time to first token behind a shared 480-token prefix, cached against not."""
    from tidegate.bench.prefix import run

    raise typer.Exit(run(json_path))


@app.command()
def http(json_path: JsonOption = None) -> None:
    """The same work streamed over HTTP by a real server, against the engine alone."""
    from tidegate.bench.over_http import run

    raise typer.Exit(run(json_path))


# Load on servers.

UrlsOption = Annotated[
    list[str],
    typer.Option("--url", help="A server to measure; several are compared, in this order.", metavar="[NAME=]URL"),
]
WorkloadOption = Annotated[
    str,
    typer.Option(
        "--workload",
        help="uniform, heavy, chat, code, rag, batch, mixed, or a TOML file with one's own.",
        metavar="NAME|FILE",
    ),
]
DurationOption = Annotated[
    str, typer.Option("--duration", help="Time in which requests arrive; answers are waited for.", metavar="DURATION")
]
SeedOption = Annotated[int, typer.Option("--seed", help="Another seed is other work of the same kind.")]
TtftOption = Annotated[
    str,
    typer.Option(
        "--ttft-slo", help="Objective for the first token: a time, or a multiple of unloaded.", metavar="5x|2s"
    ),
]
TpotOption = Annotated[
    str,
    typer.Option(
        "--tpot-slo", help="Objective per token after it: a time, or a multiple of unloaded.", metavar="3x|150ms"
    ),
]
SendSloOption = Annotated[
    bool, typer.Option("--send-slo/--no-send-slo", help="Tell the server each request's objective (field slo).")
]
RetriesOption = Annotated[
    bool | None,
    typer.Option("--retries/--no-retries", help="Retry refusals as the openai client does; default: the workload's."),
]
TimeoutOption = Annotated[
    str, typer.Option("--timeout", help="Longest that one attempt is waited for.", metavar="DURATION")
]
ModelOption = Annotated[str | None, typer.Option("--model", help="Model to ask for; default: the first one served.")]
KeyOption = Annotated[str | None, typer.Option("--api-key", help="Key that the servers ask for.")]
HtmlOption = Annotated[
    str | None, typer.Option("--html", help="Write a report with charts to this one file.", metavar="PATH")
]


@app.command()
def serve(
    url: UrlsOption,
    rate: Annotated[float, typer.Option("--rate", min=0.001, help="Mean arrivals, in requests per second.")] = 1.0,
    workload: WorkloadOption = "uniform",
    duration: DurationOption = "60s",
    seed: SeedOption = 0,
    ttft_slo: TtftOption = "5x",
    tpot_slo: TpotOption = "3x",
    send_slo: SendSloOption = True,
    retries: RetriesOption = None,
    timeout: TimeoutOption = "600s",
    model: ModelOption = None,
    api_key: KeyOption = None,
    json_path: JsonOption = None,
    html_path: HtmlOption = None,
    trace: TraceOption = None,
    scale_time: ScaleTimeOption = 1.0,
    scale_length: ScaleLengthOption = 1.0,
    window: WindowOption = None,
    assign_tenants: TenantsOption = None,
    skip_bad: SkipBadOption = False,
) -> None:
    """The same seeded load on one or more OpenAI-compatible servers: latency, goodput, refusals, fairness.

    Requests are sent when they are due, whatever the server does, and latencies count from then. With --trace the
    requests are those of the trace, and --workload, --rate and --duration are not looked at.
    """
    from tidegate.bench.serve import ServeOptions, run
    from tidegate.bench.trace import parse_options

    options = ServeOptions(
        urls=tuple(url), workload=workload, duration_s=seconds(duration, "--duration"), seed=seed, ttft_slo=ttft_slo,
        tpot_slo=tpot_slo, sends_slo=send_slo, retries=retries, timeout_s=seconds(timeout, "--timeout"), model=model,
        api_key=api_key, json_path=json_path, html_path=html_path, trace=trace,
        trace_options=parse_options(scale_time, scale_length, window, assign_tenants, skip_bad),
    )  # fmt: skip
    raise typer.Exit(run(options, rate))


def seconds(text: str, option: str) -> float:
    """The duration that an option was given, above 0. Raises ConfigError, naming the option."""
    try:
        value = parse_duration(text)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from None
    if not isinstance(value, float) or value <= 0:
        raise ConfigError(f"{option} must be above 0")
    return value


@app.command()
def sweep(
    url: UrlsOption,
    start: Annotated[
        float, typer.Option("--start", min=0.001, help="First rate of the search, in requests per second.")
    ] = 1.0,
    rates: Annotated[
        str | None, typer.Option("--rates", help="Measure these rates, and search for no capacity.", metavar="R,R,...")
    ] = None,
    multiples: Annotated[
        str, typer.Option("--multiples", help="Of the capacity found: where to measure goodput.", metavar="X,X,...")
    ] = "0.5,1,1.5,2,3,4",
    halvings: Annotated[int, typer.Option("--halvings", min=0, help="How fine the search ends: 4 is to 6%.")] = 4,
    workload: WorkloadOption = "uniform",
    duration: DurationOption = "60s",
    seed: SeedOption = 0,
    ttft_slo: TtftOption = "5x",
    tpot_slo: TpotOption = "3x",
    send_slo: SendSloOption = True,
    retries: RetriesOption = None,
    timeout: TimeoutOption = "600s",
    model: ModelOption = None,
    api_key: KeyOption = None,
    json_path: JsonOption = None,
    html_path: HtmlOption = None,
) -> None:
    """Capacity (the highest rate with 99% good), and goodput over load up to a multiple of it.

    A request is good when it got its whole answer, in the tier it asked for, within its objectives.
    """
    from tidegate.bench.serve import ServeOptions
    from tidegate.bench.sweep import SweepOptions, run

    options = ServeOptions(
        urls=tuple(url), workload=workload, duration_s=seconds(duration, "--duration"), seed=seed, ttft_slo=ttft_slo,
        tpot_slo=tpot_slo, sends_slo=send_slo, retries=retries, timeout_s=seconds(timeout, "--timeout"), model=model,
        api_key=api_key, json_path=json_path, html_path=html_path,
    )  # fmt: skip
    points = SweepOptions(start, _numbers(rates or "", "--rates"), _numbers(multiples, "--multiples"), halvings)
    raise typer.Exit(run(options, points))


def _numbers(text: str, option: str) -> tuple[float, ...]:
    """Raises ConfigError."""
    try:
        numbers = tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise ConfigError(f"{option} takes numbers like 0.5,1,2, not {text!r}") from None
    if any(not 0.0 < number < float("inf") for number in numbers):
        raise ConfigError(f"{option} takes numbers above 0")
    return numbers

"""`tidegate simulate` and `tidegate calibrate`: the command lines. Each imports what it runs when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tidegate.bench.cli import (
    DurationOption,
    JsonOption,
    RetriesOption,
    SeedOption,
    SendSloOption,
    TpotOption,
    TtftOption,
    WorkloadOption,
    seconds,
)
from tidegate.bench.trace_cli import (
    ScaleLengthOption,
    ScaleTimeOption,
    SkipBadOption,
    TenantsOption,
    TraceOption,
    WindowOption,
)
from tidegate.config import ConfigError


def simulate(
    axes: Annotated[list[str] | None, typer.Argument(help="More settings to compare.", metavar="[NAME=V,V]...")] = None,
    workers: Annotated[int, typer.Option("--workers", min=1, help="Number of machines.")] = 1,
    profile: Annotated[
        str, typer.Option("--profile", help="What a machine can do: a name, or a TOML file.", metavar="NAME|FILE")
    ] = "cpu-2core-smollm2",
    workload: WorkloadOption = "uniform",
    rate: Annotated[float, typer.Option("--rate", min=1e-6, help="Mean arrivals, in requests per second.")] = 1.0,
    duration: DurationOption = "60s",
    trace: TraceOption = None,
    scale_time: ScaleTimeOption = 1.0,
    scale_length: ScaleLengthOption = 1.0,
    window: WindowOption = None,
    assign_tenants: TenantsOption = None,
    skip_bad: SkipBadOption = False,
    seed: SeedOption = 0,
    ttft_slo: TtftOption = "5x",
    tpot_slo: TpotOption = "3x",
    send_slo: SendSloOption = True,
    retries: RetriesOption = None,
    compare: Annotated[
        list[str] | None,
        typer.Option(
            "--compare",
            help="Run each combination of these settings: order=deadline,fifo admission=on,off eviction=lru,lfu "
            "batching=static,continuous step=fixed,adaptive workers=4,8, or any other of tidegate serve.",
            metavar="NAME=V,V ...",
        ),
    ] = None,
    one_at_a_time: Annotated[
        bool,
        typer.Option("--one-at-a-time", help="With --compare: change one setting at a time, not all combinations."),
    ] = False,
    recommend: Annotated[
        bool, typer.Option("--recommend", help="Find the fewest machines with which the objectives are met.")
    ] = False,
    attainment: Annotated[
        float, typer.Option("--attainment", min=0.01, max=1.0, help="With --recommend: share that must be good.")
    ] = 0.99,
    config: Annotated[
        Path | None, typer.Option("--config", help="Configuration as of tidegate serve.", metavar="FILE.toml")
    ] = None,
    json_path: JsonOption = None,
    events_path: Annotated[
        str | None,
        typer.Option(
            "--events", help="Write steps and requests for a trace viewer (trace event format).", metavar="PATH"
        ),
    ] = None,
) -> None:
    """A workload or a trace on machines that need not exist: the real gate, scheduler and cache on a simulated clock.

    The same seed gives the same figures, to the last bit.
    """
    from tidegate.bench.trace import parse_options
    from tidegate.sim.simulate import SimulateOptions, run

    if axes and not compare:
        raise ConfigError(f"unknown argument {axes[0]!r}; settings to compare come after --compare")
    options = SimulateOptions(
        workers=workers,
        profile=profile,
        workload=workload,
        rate=rate,
        duration_s=seconds(duration, "--duration"),
        trace=trace,
        trace_options=parse_options(scale_time, scale_length, window, assign_tenants, skip_bad),
        seed=seed,
        ttft_slo=ttft_slo,
        tpot_slo=tpot_slo,
        sends_slo=send_slo,
        retries=retries,
        compare=(*(compare or ()), *(axes or ())),
        one_at_a_time=one_at_a_time,
        config_path=config,
        json_path=json_path,
        events_path=events_path,
    )
    if recommend:
        from tidegate.sim.recommend import run as run_recommend

        raise typer.Exit(run_recommend(options, attainment))
    raise typer.Exit(run(options))


def calibrate(
    output: Annotated[
        Path | None, typer.Argument(help="Profile to write; default: printed.", metavar="[FILE.toml]")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="Configuration as of tidegate serve.", metavar="FILE.toml")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="Model to measure; default: that of tidegate serve.")
    ] = None,
    budget: Annotated[str, typer.Option("--budget", help="Time to measure for.", metavar="DURATION")] = "30s",
) -> None:
    """Measure what a step costs on this machine, and write a profile for tidegate simulate."""
    from tidegate.sim.calibrate import run

    raise typer.Exit(run(output, config, model, seconds(budget, "--budget")))


def add_to(app: typer.Typer) -> None:
    app.command("simulate")(simulate)
    app.command("calibrate")(calibrate)

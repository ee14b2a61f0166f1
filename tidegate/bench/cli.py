"""`tidegate bench ...`: the command line of the benchmarks. Every command imports what it runs when it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from tidegate.config import ConfigError

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
def scheduler(json_path: JsonOption = None) -> None:
    """The scheduler alone: schedule and apply of a step, up to 1,000 running and 10,000 waiting."""
    from tidegate.bench.scheduler import run

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

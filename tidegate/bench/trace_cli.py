"""The options of a trace, as `tidegate bench serve` and `tidegate simulate` share them."""

from __future__ import annotations

from typing import Annotated

import typer

TraceOption = Annotated[
    str | None,
    typer.Option(
        "--trace", help="Serve this trace (Mooncake JSON lines or Azure CSV, gzipped or not).", metavar="FILE"
    ),
]
ScaleTimeOption = Annotated[
    float, typer.Option("--scale-time", help="Stretch the trace's times: 2 is half the rate.", metavar="FACTOR")
]
ScaleLengthOption = Annotated[
    float, typer.Option("--scale-length", help="Stretch the trace's prompts and answers.", metavar="FACTOR")
]
WindowOption = Annotated[
    str | None,
    typer.Option("--window", help="Serve this part of the trace's time, like 60s:120s.", metavar="FROM:TO"),
]
TenantsOption = Annotated[
    str | None,
    typer.Option(
        "--assign-tenants",
        help="Spread the trace's requests over tenants by Zipf's law; default: 10 of them, exponent 1.",
        metavar="zipf[:N[:S]]",
    ),
]
SkipBadOption = Annotated[
    bool, typer.Option("--skip-bad", help="Leave out bad lines of a trace, and count them, instead of stopping.")
]

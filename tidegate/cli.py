"""The `tidegate` command: serve, chat, explain, model, tenant, bench.

Owns: the command line. The flags of `serve` are generated from config.py: one flag a field, with its description,
default and unit. Never does: any work itself. Every command imports what it needs when it runs, so that `--help` is
there at once.

A ConfigError (which a ModelError is too) is one line on stderr and exit code 2. What a running server answers, or that
there is none, is one line and exit code 1.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from tidegate.bench.cli import app as bench_app
from tidegate.config import ConfigError, flag_name, flags, load_config
from tidegate.sim.cli import add_to as add_simulation
from tidegate.terminal import TerminalError
from tidegate.version import __version__

DEFAULT_URL = "http://127.0.0.1:8000"

app = typer.Typer(
    name="tidegate",
    help="Serve open-weight language models over an OpenAI-compatible API, and keep the latency promises made.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
model_app = typer.Typer(help="The models on this machine.", no_args_is_help=True)
app.add_typer(model_app, name="model")
tenant_app = typer.Typer(help="Who may use a server.", no_args_is_help=True)
app.add_typer(tenant_app, name="tenant")
app.add_typer(bench_app, name="bench")
add_simulation(app)

UrlOption = Annotated[str, typer.Option("--url", help="Address of the running server.", metavar="URL")]
JsonOption = Annotated[
    str | None, typer.Option("--json", help="Write JSON to this file; - prints it.", metavar="PATH|-")
]
ApiKeyOption = Annotated[str | None, typer.Option("--api-key", help="Key that the server asks for; default: none.")]


def main() -> None:
    """The console script."""
    try:
        app()
    except ConfigError as error:
        sys.exit(_fail(error, 2))
    except TerminalError as error:
        sys.exit(_fail(error, 1))


def _fail(error: Exception, exit_code: int) -> int:
    print(f"tidegate: {error}", file=sys.stderr)
    return exit_code


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"tidegate {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and leave.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    pass


# serve: its parameters are made from Config.


def _serve(config: Path | None, **given: Any) -> None:
    """Serve a model over an OpenAI-compatible API.

    Flags win over the file given with --config, which has one table for each group below and the flags' names as
    keys, with _ for -. A SIZE reads like 1GiB or 512MiB, a DURATION like 2s or 250ms. SIGHUP reads the file again: its
    tiers and gate settings take effect at once.
    """
    for flag in flags():
        if flag.is_switch and given.pop(f"no_{flag.name}"):
            given[flag.name] = False
    settings = load_config(config, given)
    from tidegate.api.serve import run

    raise typer.Exit(run(settings, lambda: load_config(config, given)))


def _serve_parameters() -> Iterator[inspect.Parameter]:
    """--config, and the flags. None means not given; config.py converts and judges what was given."""
    config_option = typer.Option("--config", help="TOML file with the same settings.", metavar="FILE.toml")
    yield _keyword("config", Annotated[Path | None, config_option])
    for flag in flags():
        text = flag.description
        if flag.choices:
            text += f" One of {', '.join(flag.choices)}."
        if flag.default:
            text += f" Default: {flag.default}."
        if flag.is_switch:
            yield _keyword(flag.name, Annotated[bool | None, _flag_option(flag.name, flag.component, text, "")])
            off = _flag_option(f"no_{flag.name}", flag.component, f"Turn {flag_name(flag.name)} off.", "")
            yield _keyword(f"no_{flag.name}", Annotated[bool | None, off])
        else:
            yield _keyword(flag.name, Annotated[str | None, _flag_option(flag.name, flag.component, text, flag.value)])


def _flag_option(name: str, component: str, text: str, value: str) -> Any:
    return typer.Option(flag_name(name), help=text, metavar=value, show_default=False, rich_help_panel=component)


def _keyword(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


_serve.__signature__ = inspect.Signature(list(_serve_parameters()))  # type: ignore[attr-defined]
app.command("serve")(_serve)


# Models on this machine.


@model_app.command("list")
def model_list(json_path: JsonOption = None) -> None:
    """The catalog, and what of it is on this machine."""
    from tidegate.models import list_models
    from tidegate.models.fetch import is_fetched

    rows: list[dict[str, Any]] = [
        {
            "name": model.name,
            "title": model.title,
            "license": model.license,
            "bytes": model.gguf_bytes,
            "fetched": is_fetched(model),
        }
        for model in list_models()
    ]
    if json_path is not None:
        _write_json(rows, json_path)
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for heading in ("name", "model", "license", "size", "here"):
        table.add_column(heading, justify="right" if heading == "size" else "left")
    for row in rows:
        size = f"{row['bytes'] / 1e6:.0f} MB"
        table.add_row(row["name"], row["title"], row["license"], size, "yes" if row["fetched"] else "no")
    Console().print(table)


@model_app.command("pull")
def model_pull(
    name: Annotated[str, typer.Argument(help="Name in the catalog.", metavar="NAME")],
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bars.")] = False,
) -> None:
    """Fetch a model of the catalog and check it. What is here already is not fetched again. Prints its path."""
    from tidegate.models.fetch import pull

    print(pull(name, progress=not quiet))


@model_app.command("path")
def model_path(name: Annotated[str, typer.Argument(help="Name in the catalog.", metavar="NAME")]) -> None:
    """Where a fetched model lies."""
    from tidegate.models.fetch import path

    print(path(name))


# Tenants.


@tenant_app.command("new-key")
def tenant_new_key(
    name: Annotated[str, typer.Argument(help="Name of the tenant; a new one gets a table.", metavar="NAME")],
    config: Annotated[
        Path, typer.Option("--config", help="TOML file that gets the key's hash.", metavar="FILE.toml")
    ] = Path("tidegate.toml"),
) -> None:
    """Print a new key, once; the configuration keeps its hash alone. A running server takes it in on SIGHUP."""
    from tidegate.terminal.tenant import new_key

    print(new_key(name, config))


@app.command()
def usage(
    file: Annotated[Path, typer.Option("--file", help="The server's --usage-file.", metavar="FILE")],
    since: Annotated[
        str | None, typer.Option("--since", help="From this day, or this long ago, on; default: all.", metavar="DAY|7d")
    ] = None,
    by: Annotated[
        str, typer.Option("--by", help="A row for each: tenant, tier, day, hour; several with commas.", metavar="NAMES")
    ] = "tenant,tier",
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    json_path: JsonOption = None,
) -> None:
    """What each tenant has used: requests by outcome, tokens, downgrades, refusals. The server may be running."""
    from tidegate.usage import report
    from tidegate.usage.store import read_usage

    rows = report.usage_rows(read_usage(file, report.parse_since(since)), by.split(","))
    if json_path is not None:
        _write_json(rows, json_path)
    elif as_csv:
        print(report.as_csv(rows), end="")
    else:
        report.print_table(rows)


# Talking to a running server.


@app.command()
def chat(
    url: UrlOption = DEFAULT_URL,
    model: Annotated[str, typer.Option("--model", help="Name of a served model.")] = "default",
    api_key: ApiKeyOption = None,
    system: Annotated[str | None, typer.Option("--system", help="System message to begin with; default: none.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", min=1, help="Most tokens an answer may have; default: the server's.")
    ] = None,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0.0, max=2.0, help="0 always takes the likeliest token.")
    ] = 0.2,
) -> None:
    """Talk to a running server. Ctrl-C stops an answer, Ctrl-D leaves."""
    from tidegate.terminal.chat import Chat
    from tidegate.terminal.client import ServerClient

    with ServerClient(url, api_key) as client:
        Chat(client, model, system=system, max_tokens=max_tokens, temperature=temperature).run()


@app.command()
def explain(
    request_id: Annotated[str, typer.Argument(help="Id of a recent request: its answer's `id`.", metavar="ID")],
    url: UrlOption = DEFAULT_URL,
    api_key: ApiKeyOption = None,
    json_path: JsonOption = None,
) -> None:
    """Where a request's time went, stage by stage, and the main cause of its time to first token."""
    from tidegate.terminal.client import ServerClient
    from tidegate.terminal.explain import print_timeline

    with ServerClient(url, api_key) as client:
        timeline = client.timeline(request_id)
    if json_path is None:
        print_timeline(timeline)
    else:
        _write_json(timeline, json_path)


def _write_json(document: object, json_path: str) -> None:
    text = json.dumps(document, indent=2)
    if json_path == "-":
        print(text)
        return
    try:
        Path(json_path).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {json_path}: {error.strerror}") from None

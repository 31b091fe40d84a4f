"""This file has the arguments and help texts of `asterism sandbox`."""

import os
from pathlib import Path
from typing import Annotated

import typer

from asterism.actors.cli.console import make_console
from asterism.actors.cli.log.subcommands import SetOption

sandbox_app = typer.Typer(help="Serve, try, measure and check the sandbox without a run.", no_args_is_help=True)
ConfigOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Configuration file in TOML (default: built-in defaults).")
]
AtOption = Annotated[
    Path | None, typer.Option(metavar="FOLDER", help="Use the sandbox served in this folder (default: start one).")
]


@sandbox_app.command()
def serve(
    at: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Private folder for the sandbox's sockets (default: asterism-sandbox in $XDG_RUNTIME_DIR).",
        ),
    ] = None,
    config: ConfigOption = None,
    override: SetOption = None,
) -> None:
    """Serve sandbox calls to processes of the same user, until Ctrl-C."""
    from asterism.actors.cli.sandbox_commands import load_config_or_defaults
    from asterism.actors.sandbox_service.sandbox_client import get_default_folder
    from asterism.actors.sandbox_service.sandbox_server import serve_sandbox

    folder = at or get_default_folder(os.environ)
    serve_sandbox(load_config_or_defaults(config, override or []), folder, make_console())


@sandbox_app.command()
def shell(at: AtOption = None, config: ConfigOption = None, override: SetOption = None) -> None:
    """Open a notebook in the sandbox and show the output as a model reads it. Ctrl-D exits."""
    from asterism.actors.cli.sandbox_commands import load_config_or_defaults, open_shell, suppress_logs

    suppress_logs()
    open_shell(load_config_or_defaults(config, override or []), at, make_console())


@sandbox_app.command(name="bench")
def bench_sandbox(
    at: AtOption = None,
    seconds: Annotated[float, typer.Option(min=1, help="Approximate duration of the benchmark.")] = 20,
    config: ConfigOption = None,
    override: SetOption = None,
) -> None:
    """Measure calls per second and latencies.

    The last line of the output has the figures as JSON.
    """
    import json

    from asterism.actors.cli.sandbox_commands import load_config_or_defaults, run_benchmark, suppress_logs

    suppress_logs()
    typer.echo(json.dumps(run_benchmark(load_config_or_defaults(config, override or []), at, seconds, make_console())))


@sandbox_app.command(name="doctor")
def diagnose_sandbox(config: ConfigOption = None, override: SetOption = None) -> None:
    """Run code that tries to escape and report the result. Exit with 1 if an attempt succeeds."""
    from asterism.actors.cli.sandbox_commands import examine_sandbox, load_config_or_defaults, suppress_logs

    suppress_logs()
    raise typer.Exit(0 if examine_sandbox(load_config_or_defaults(config, override or []), make_console()) else 1)

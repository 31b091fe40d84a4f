"""`asterism metrics` delivers the records of a run to metric sinks after its end."""

import subprocess
from typing import Annotated

import typer
from rich.markup import escape

from asterism.actors.cli.console import make_console
from asterism.actors.cli.log.subcommands import RunArgument, SetOption, open_run_folder
from asterism.configs.choices.sink_kinds import SINK_KINDS

metrics_app = typer.Typer(help="Deliver the metrics of a run to sinks, such as TensorBoard.", no_args_is_help=True)

SinkOption = Annotated[
    list[str] | None,
    typer.Option(metavar="SINK", help=f"{', '.join(SINK_KINDS)}; may be repeated (default: metrics.sinks of the run)."),
]


@metrics_app.callback()
def accept_no_options() -> None:
    """Do nothing: a group with one command stays a group only if it has a callback."""


@metrics_app.command()
def sync(run: RunArgument, sink: SinkOption = None, override: SetOption = None) -> None:
    """Deliver the records that a sink has not received: after an outage, or to a sink that the run did not have.

    --set changes keys such as metrics.project. Exit with 1 if a sink fails.
    """
    from asterism.actors.launch.metric_sinks import build_sink_argv
    from asterism.actors.sinks.contract import check_sinks
    from asterism.actors.sinks.delivery import count_undelivered, make_identity
    from asterism.configs.errors import UnusableInput
    from asterism.configs.load import load_with_overrides

    folder, console = open_run_folder(run), make_console()
    config = load_with_overrides(folder.config, override or [], ["metrics"])
    names = check_sinks(sink or config.metrics.sinks)
    if not names:
        raise UnusableInput(f"{folder.config}: the run has no metrics.sinks; name one with --sink")
    make_identity(folder)
    flags = [flag for setting in override or [] for flag in ("--set", setting)]
    failed = False
    for name in names:
        before, total = count_undelivered(folder, name)
        if before:
            argv = build_sink_argv(folder, name, follow=False)
            failed |= subprocess.run([*argv, *flags], check=False).returncode != 0
        left, _ = count_undelivered(folder, name)
        text = f"{name}: {before - left} of {total} records delivered now, {left} not delivered"
        console.print(escape(text), highlight=False, soft_wrap=True)
    raise typer.Exit(int(failed))

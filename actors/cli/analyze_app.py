"""The `asterism analyze` command: the arguments and help texts of its subcommands."""

from typing import Annotated

import typer

from asterism.actors.cli.console import make_console
from asterism.actors.cli.log.subcommands import JsonOption

analyze_app = typer.Typer(help="Analyze what the policy of a run has generated.", no_args_is_help=True)


@analyze_app.callback()
def accept_no_options() -> None:
    """Do nothing: a group with one subcommand stays a group only if it has a callback."""


@analyze_app.command()
def entropy(
    checkpoint: Annotated[
        str, typer.Argument(help="A run's folder, or RUN:STEP for one of its exported steps.", metavar="RUN[:STEP]")
    ],
    trajectories: Annotated[int, typer.Option(min=1, help="Number of trajectories of this step to score.")] = 200,
    shown: Annotated[int, typer.Option(min=0, help="Number of dialogues on the page.")] = 20,
    seed: Annotated[int, typer.Option(min=0, help="Random seed of the choice of trajectories.")] = 0,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="Sampling temperature (default: sampling.temperature).")
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Compute the policy's entropy at each generated token, by kind: reasoning, reflection on results, calls, answers.

    The tokens are those of the trajectories and evaluations that this step generated, read from the event log; the
    exported model of the step gives the entropies. Writes a page with highlighted dialogues, and a figure.
    """
    from asterism.actors.cli.entropy_command import EntropyOptions, analyze_entropy

    options = EntropyOptions(checkpoint, trajectories, shown, seed, temperature, json_file)
    analyze_entropy(options, make_console())

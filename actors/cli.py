"""The command line: `asterism run`, `join`, `report`, `simulate`, `log`, `doctor`, `keys`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from actors.log_cli import RunArgument, SetOption, log_app
from configs.errors import UNUSABLE, UnusableInput
from sandbox.contract import SandboxFailure

app = typer.Typer(
    help="Train language models that think with a Python tool: event-driven GRPO-RoC.",
    epilog="A run lives in one folder, runs/NAME: configuration, logs, event logs, metrics, checkpoints, pictures.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
app.add_typer(log_app, name="log")
sandbox_app = typer.Typer(help="The code environment by itself: serve it, try it, measure it.", no_args_is_help=True)
app.add_typer(sandbox_app, name="sandbox")

ConfigOption = Annotated[Path | None, typer.Option("--config", help="A TOML file; the defaults without one.")]
AtOption = Annotated[Path | None, typer.Option("--at", help="Use the sandbox that is served in this folder.")]


def _console(*, stderr: bool = False) -> Console:
    """Paths and what others said are shown as they are: no emoji stands for `:100:` in them."""
    return Console(emoji=False, stderr=stderr)


@app.command()
def run(
    config: Annotated[Path, typer.Argument(help="A TOML file, such as configs/tiny.toml.", metavar="CONFIG")],
    override: SetOption = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the run's last checkpoint.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Delete the run of this name and begin anew.")] = False,
) -> None:
    """Run the whole recipe of CONFIG: cold start, RL steps, evaluation.

    ^C ends all processes in order; `--resume` goes on later.
    """
    from actors.run_command import run_recipe

    raise typer.Exit(run_recipe(config, override or [], resume=resume, overwrite=overwrite, console=_console()))


@app.command()
def join(
    endpoint: Annotated[
        str,
        typer.Argument(help="Where the run listens: tcp://HOST:PORT, as it says when it begins.", metavar="ENDPOINT"),
    ],
    key: Annotated[Path, typer.Option("--key", help="The cluster's key, made by `asterism keys`.")],
    generators: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, help="Engines of this node; as many as the configuration says without it."),
    ] = None,
    executors: Annotated[int | None, typer.Option(metavar="N", min=0, help="Executors of this node; likewise.")] = None,
    host: Annotated[str, typer.Option("--host", help="This node's address, if not the one that leads there.")] = "",
    port: Annotated[
        int, typer.Option("--port", show_default=False, help="The first of 100 to listen at; the run's without it.")
    ] = 0,
    run_folder: Annotated[
        Path | None, typer.Option("--run-folder", help="The run's folder, if it has another path here.")
    ] = None,
    patience: Annotated[float, typer.Option("--patience", min=0, help="Seconds to wait for the run to answer.")] = 300,
) -> None:
    """Take part in the run at ENDPOINT with this machine's engines and executors, until the run is over.

    ^C leaves the run, which goes on without this node.
    """
    from actors.join_command import address_of, join_run, own_address
    from actors.node import Joining

    at = address_of(endpoint)
    num_generators, num_executors = (-1 if number is None else number for number in (generators, executors))
    own = own_address(at, host, port)
    joining = Joining(at, own, key, num_generators, num_executors, run_folder, patience)
    raise typer.Exit(join_run(joining, _console()))


@app.command()
def report(
    run: RunArgument,
    json: Annotated[bool, typer.Option("--json", help="Print the utilization as JSON, and nothing else.")] = False,
) -> None:
    """Show a run's summary, draw its curves again, and say where its time went: engines, tools, waits, stragglers."""
    from actors.report_command import report_run

    report_run(run, json=json, console=_console())


@app.command()
def doctor(
    config: Annotated[
        Path | None, typer.Option("--config", help="Also what the run of this TOML file needs: servers, ports, GPUs.")
    ] = None,
    override: SetOption = None,
) -> None:
    """Say what this machine has and lacks for a run, with the remedy for each lack. Exits with 1 if anything is missing."""
    from actors.doctor import examine
    from actors.finding import findings_table
    from actors.sandbox_commands import quiet, settings

    run = settings(config, override or []) if config or override else None
    quiet()
    findings = examine(run=run)
    _console().print(findings_table(findings))
    raise typer.Exit(int(any(finding.status == "missing" for finding in findings)))


@app.command()
def keys(
    folder: Annotated[
        Path, typer.Argument(help="Where cluster.key goes; each node needs a copy of it.", metavar="FOLDER")
    ],
) -> None:
    """Make the key that the processes of a cluster prove to each other they hold, and that encrypts what they send."""
    from bus.curve import load_key, make_key

    path = make_key(folder)
    console = _console()
    console.print(f"{escape(str(path))}: copy it to every node, and show it to nobody", soft_wrap=True)
    console.print(f"its public half: {escape(load_key(path).public.decode())}", soft_wrap=True)


@app.command()
def simulate(
    workload: Annotated[
        str,
        typer.Argument(
            help="report, one_node, heavy_tail or tool_bound; or a run's folder, such as runs/demo.",
            metavar="WORKLOAD|RUN",
        ),
    ],
    policies: Annotated[
        str, typer.Option("--policies", help="Side by side, with commas, or all; oracle knows all lengths.")
    ] = "static,kv,kv_lookahead",
    seed: Annotated[int, typer.Option("--seed", help="Of the workload's draws.")] = 0,
    scale: Annotated[float, typer.Option(min=0.01, help="Of prompts and engines alike, for a quick look.")] = 1.0,
    step: Annotated[
        int | None, typer.Option("--step", min=1, help="Of a recorded run; its last one without it.")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option("--cluster", help="8xh100, 8xh200 or 64xmi300x; the workload's own without it.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all figures there.")] = None,
    picture: Annotated[Path | None, typer.Option("--picture", metavar="FILE", help="Draw them there.")] = None,
    run: Annotated[
        Path | None,
        typer.Option(
            "--run", metavar="FOLDER", help="Leave logs for `asterism report` there; of several policies in one each."
        ),
    ] = None,
) -> None:
    """Simulate one step's rollouts under several policies: makespan, utilization, waits, and two lower bounds."""
    from actors.simulate_command import Options, simulate_workload

    options = Options(workload, policies, seed, scale, step, cluster, json_file, picture, run)
    simulate_workload(options, _console())


@sandbox_app.command()
def serve(
    at: Annotated[Path, typer.Option("--at", help="The folder for its socket.")] = Path("/tmp/asterism-sandbox"),
    config: ConfigOption = None,
    override: SetOption = None,
) -> None:
    """Serve calls to every process of this machine that may enter the folder, until ^C."""
    from actors.sandbox_commands import serve_sandbox, settings

    serve_sandbox(settings(config, override or []), at, _console())


@sandbox_app.command()
def shell(at: AtOption = None, config: ConfigOption = None, override: SetOption = None) -> None:
    """A notebook in the sandbox: what you type runs there, and you read what a model would. ^D ends it."""
    from actors.sandbox_commands import open_shell, quiet, settings

    quiet()
    open_shell(settings(config, override or []), at, _console())


@sandbox_app.command(name="bench")
def bench_sandbox(
    at: AtOption = None,
    seconds: Annotated[float, typer.Option(min=1, help="How long, about.")] = 20,
    config: ConfigOption = None,
    override: SetOption = None,
) -> None:
    """Calls per second and latencies, with the figures as JSON in the last line."""
    import json

    from actors.sandbox_commands import bench, quiet, settings

    quiet()
    typer.echo(json.dumps(bench(settings(config, override or []), at, seconds, _console())))


@sandbox_app.command(name="doctor")
def sandbox_doctor(config: ConfigOption = None, override: SetOption = None) -> None:
    """Run code that tries to get out, and say what held. Exits with 1 if anything did not."""
    from actors.sandbox_commands import examine_sandbox, quiet, settings

    quiet()
    raise typer.Exit(0 if examine_sandbox(settings(config, override or []), _console()) else 1)


def main() -> None:
    try:
        app()
    except (UnusableInput, SandboxFailure) as error:
        _console(stderr=True).print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(UNUSABLE)


if __name__ == "__main__":
    main()

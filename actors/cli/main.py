"""This file has the arguments and help texts of the `asterism` command and of most subcommands."""

import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from asterism.actors.cli.analyze_app import analyze_app
from asterism.actors.cli.chat.chat_command import KeyOption, ModelOption, TokenizerOption, chat
from asterism.actors.cli.console import ending_without_output, escape_controls, hide_library_warnings, make_console
from asterism.actors.cli.data_commands import data_app
from asterism.actors.cli.log.subcommands import JsonOption, RunArgument, SetOption, log_app
from asterism.actors.cli.metrics_commands import metrics_app
from asterism.actors.cli.sandbox_app import ConfigOption, sandbox_app
from asterism.actors.cli.serving.serving_commands import add_serving_commands
from asterism.actors.cli.task_commands import task_app
from asterism.bus.process.waiting import forward_to_sigint
from asterism.configs.errors import EXIT_UNUSABLE, UnusableInput
from asterism.sandbox.contract import SandboxFailure

_HELP_FLAGS = {"help_option_names": ["-h", "--help"]}
app = typer.Typer(
    help="Train language models to reason with a Python tool: event-driven GRPO-RoC.",
    epilog="Each run has one folder, runs/NAME: configuration, logs, event logs, metrics, checkpoints, figures.",
    no_args_is_help=True,
    context_settings=_HELP_FLAGS,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
app.add_typer(log_app, name="log", rich_help_panel="Look")
app.add_typer(task_app, name="task", rich_help_panel="Prepare")
app.add_typer(data_app, name="data", rich_help_panel="Prepare")
app.add_typer(metrics_app, name="metrics", rich_help_panel="Look")
app.add_typer(analyze_app, name="analyze", rich_help_panel="Look")
app.add_typer(sandbox_app, name="sandbox", rich_help_panel="Machines")

WorkloadArgument = Annotated[
    str,
    typer.Argument(
        help="Workload (report, one_node, heavy_tail, tool_bound) or the folder of a recorded run.",
        metavar="WORKLOAD|RUN",
    ),
]
PoliciesOption = Annotated[
    str, typer.Option(help='Comma-separated policies to compare, or "all" ("oracle" knows the true lengths).')
]
LogsOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER", help="Write logs for `asterism report` here, with several policies to a subfolder each."
    ),
]


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"asterism {version('asterism')}")
        raise typer.Exit


@app.callback()
def accept_global_options(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


@app.command(rich_help_panel="Train")
def run(
    config: Annotated[
        Path, typer.Argument(help="Configuration file in TOML, such as configs/tiny.toml.", metavar="CONFIG")
    ],
    name: Annotated[
        str | None, typer.Option(help="Name of the run and of its folder, instead of the configuration's.")
    ] = None,
    override: SetOption = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume the run from its last checkpoint.")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Delete an existing run of this name and start over.")
    ] = False,
    from_stage: Annotated[
        str, typer.Option(metavar="STAGE", help="Begin with this stage; those before are finished.")
    ] = "",
) -> None:
    """Run the full recipe of CONFIG: cold start, RL steps in one or several stages, evaluation.

    Ctrl-C stops all processes in order; `--resume` continues the run later.
    """
    from asterism.actors.cli.run_command import run_recipe
    from asterism.actors.stages.stage_sequence import StageSelection

    overrides = list(override or [])
    if name is not None:
        overrides.append(f"name={name}")
    raise typer.Exit(run_recipe(config, overrides, StageSelection(resume, overwrite, from_stage), make_console()))


@app.command(name="eval", rich_help_panel="Train")
def evaluate(
    targets: Annotated[
        list[str],
        typer.Argument(help="A model's folder, RUN, RUN:STEP, or URLs of servers.", metavar="CHECKPOINT|URL..."),
    ],
    setting: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=FILE",
            help="Questions to answer (default: the run's test questions). Also KEY=VALUE for the configuration.",
        ),
    ] = None,
    samples: Annotated[int | None, typer.Option("-k", min=1, help="Answers per question (default: 1).")] = None,
    questions: Annotated[int | None, typer.Option(min=1, help="Questions of each set, at most (default: all).")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="0: greedy (default: the configuration's).")] = None,
    config: ConfigOption = None,
    tokenizer: TokenizerOption = None,
    model: ModelOption = "",
    api_key_variable: KeyOption = "",
    name: Annotated[str | None, typer.Option(help="Name of the evaluation's folder in runs/.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue with the missing answers.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Delete an existing folder of this name.")] = False,
) -> None:
    """Evaluate a checkpoint or a server on sets of questions, with several answers per question.

    Tasks, tools and limits are those of the checkpoint's run, or of --config. Ctrl-C stops; --resume continues.
    """
    from asterism.actors.cli.eval_command import run_evaluation
    from asterism.actors.evaluation.evaluation_run import EvalOptions, ServerOptions

    server = ServerOptions(tokenizer, model, api_key_variable)
    options = EvalOptions(targets, setting or [], config, samples, questions, temperature, name, server)
    raise typer.Exit(run_evaluation(options, resume=resume, overwrite=overwrite, console=make_console()))


@app.command(rich_help_panel="Prepare")
def doctor(
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also check what this configuration needs: servers, ports, GPUs."),
    ] = None,
    override: SetOption = None,
) -> None:
    """Check this machine and print a remedy for each problem.

    Exit with 1 if `asterism run` would refuse to begin: a requirement is missing or unusable.
    """
    from asterism.actors.cli.doctor.finding import build_findings_table
    from asterism.actors.cli.doctor.machine_checks import examine
    from asterism.actors.cli.sandbox_commands import load_config_or_defaults, suppress_logs

    run = load_config_or_defaults(config, override or []) if config or override else None
    suppress_logs()
    findings = examine(run=run)
    make_console().print(build_findings_table(findings))
    raise typer.Exit(int(any(finding.is_refused for finding in findings.values())))


@app.command(rich_help_panel="Prepare")
def plan(
    config: Annotated[Path, typer.Argument(help="Configuration file in TOML.", metavar="CONFIG")],
    override: SetOption = None,
    gpu: Annotated[
        str | None, typer.Option(help="a100, h100, h200 or mi300x (default: plan for this machine).")
    ] = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="GPUs per node, with --gpu (default: 8).")] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Nodes (default: cluster.nodes).")] = None,
    gpu_memory_gib: Annotated[float | None, typer.Option(min=0, help="Memory of a GPU.")] = None,
    host_memory_gib: Annotated[float | None, typer.Option(min=0, help="Main memory of a node.")] = None,
    shared_memory_gib: Annotated[float | None, typer.Option(min=0, help="Size of /dev/shm of a node.")] = None,
    disk_gib: Annotated[float | None, typer.Option(min=0, help="Free space for the run's folder.")] = None,
    mfu: Annotated[float, typer.Option(min=0.01, max=1, help="Share of the peak rate in training.")] = 0.4,
    mean_tokens_share: Annotated[
        float, typer.Option(min=0.01, max=1, help="Mean length of a trajectory, as a share of the longest.")
    ] = 0.5,
    gpu_reserve_gib: Annotated[
        float, typer.Option(min=0, help="Reserve of each GPU: CUDA context, NCCL, allocator.")
    ] = 2.0,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure the rates of this machine, in some seconds.")
    ] = False,
    json_file: JsonOption = None,
) -> None:
    """Estimate memory, disk and seconds per step of CONFIG, and name the keys to change if it does not fit.

    Needs only config.json of model.checkpoint. Exit with 1 if something does not fit.
    """
    from asterism.actors.cli.planning.plan_command import PlanOptions, print_plan

    sizes = gpu_memory_gib, host_memory_gib, shared_memory_gib, disk_gib
    options = PlanOptions(gpu, gpus, nodes, *sizes, mfu, mean_tokens_share, gpu_reserve_gib, measure, json_file)
    raise typer.Exit(print_plan(config, override or [], options, make_console()))


@app.command(name="config", rich_help_panel="Prepare")
def show_config(
    config: Annotated[Path | None, typer.Argument(help="Configuration file in TOML (default: none).")] = None,
    override: SetOption = None,
    migrate: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Rewrite a file with former names of keys and import paths, and print nothing else."
        ),
    ] = None,
) -> None:
    """Print all keys of a configuration with their values and descriptions."""
    from asterism.actors.cli.config_command import migrate_file, print_config

    if migrate is not None:
        migrate_file(migrate, make_console())
    else:
        print_config(config, override or [], make_console())


@app.command(rich_help_panel="Look")
def report(
    run: RunArgument,
    json: Annotated[bool, typer.Option("--json", help="Print the utilization as JSON and nothing else.")] = False,
) -> None:
    """Print a run's summary, redraw its curves, and show where its time went.

    The report covers engines, tools, waits and stragglers.
    """
    from asterism.actors.cli.report_command import report_run

    report_run(run, json=json, console=make_console())


@app.command(rich_help_panel="Look")
def simulate(
    workload: WorkloadArgument,
    policies: PoliciesOption = "static,worst_case,kv_lookahead",
    seed: Annotated[int, typer.Option(help="Random seed of the workload.")] = 0,
    scale: Annotated[float, typer.Option(min=0.01, help="Scale the workload and the cluster by this factor.")] = 1.0,
    step: Annotated[
        int | None, typer.Option(min=1, help="Step of a recorded run to simulate (default: its last).")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(help="8xh100, 8xh200 or 64xmi300x (default: the workload's own).")
    ] = None,
    json_file: JsonOption = None,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a figure of the results; a PNG also as SVG.")
    ] = None,
    run: LogsOption = None,
) -> None:
    """Simulate the rollouts of one step under several policies.

    The table shows makespan, utilization, waits and two lower bounds.
    """
    from asterism.actors.cli.planning.simulate_command import SimulateOptions, simulate_workload

    options = SimulateOptions(workload, policies, seed, scale, step, cluster, json_file, picture, run)
    simulate_workload(options, make_console())


app.command(rich_help_panel="Look")(chat)
add_serving_commands(app)


@app.command(rich_help_panel="Machines")
def join(
    endpoint: Annotated[
        str, typer.Argument(help="The run's endpoint, tcp://HOST:PORT, as it prints at its start.", metavar="ENDPOINT")
    ],
    key: Annotated[Path, typer.Option(metavar="FILE", help="The cluster's key, created by `asterism keys`.")],
    generators: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, help="Number of engines on this node (default: the run's configuration)."),
    ] = None,
    executors: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, help="Number of executors on this node (default: the run's configuration)."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address at which other nodes reach this one (default: detected).")] = "",
    port: Annotated[
        int, typer.Option(show_default=False, help="First of 100 ports to listen on (default: the run's).")
    ] = 0,
    run_folder: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="The run's folder, if its path differs on this node.")
    ] = None,
    patience: Annotated[
        float, typer.Option(min=0, help="Seconds to wait for an answer of the run before giving up.")
    ] = 300,
) -> None:
    """Add this machine's engines and executors to the run at ENDPOINT until the run ends.

    Ctrl-C leaves the run, which continues without this node.
    """
    from asterism.actors.cli.join_command import choose_own_address, join_run, parse_endpoint
    from asterism.actors.launch.join_handshake import JoinOptions

    at = parse_endpoint(endpoint)
    num_generators, num_executors = (-1 if number is None else number for number in (generators, executors))
    own = choose_own_address(at, host, port)
    joining = JoinOptions(at, own, key, num_generators, num_executors, run_folder, patience)
    raise typer.Exit(join_run(joining, make_console()))


@app.command(rich_help_panel="Machines")
def keys(
    folder: Annotated[
        Path, typer.Argument(help="Folder in which to create cluster.key; each node needs a copy.", metavar="FOLDER")
    ],
) -> None:
    """Create the key with which processes of a cluster authenticate and encrypt messages."""
    from asterism.bus.transport.curve_auth import generate_key, load_key

    path = generate_key(folder)
    console = make_console()
    console.print(f"{escape(str(path))}: copy it to every node and keep it secret", soft_wrap=True)
    console.print(f"public key: {escape(load_key(path).public.decode())}", soft_wrap=True)


def main() -> None:
    hide_library_warnings()
    forward_to_sigint()
    with ending_without_output():
        try:
            app()
        except (UnusableInput, SandboxFailure) as error:
            cause = escape(escape_controls(str(error)))
            make_console(stderr=True).print(f"[bold red]error:[/] {cause}", highlight=False, soft_wrap=True)
            sys.exit(EXIT_UNUSABLE)


if __name__ == "__main__":
    main()

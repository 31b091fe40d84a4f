"""`asterism plan` estimates whether a configuration fits the machines, and how long a step takes."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace
from rich.console import Console

from asterism.actors.cli.console import check_json_path, write_json
from asterism.actors.cli.planning.local_machine import detect_machine
from asterism.actors.launch.checks.data_checks import resolve_checkpoint
from asterism.analysis.planning.plan_inputs import GIB, GPUS, Assumptions, PlanInputs, PlannedMachines
from asterism.analysis.planning.plan_table import build_plan_tables
from asterism.analysis.planning.run_plan import RunPlan, build_plan
from asterism.configs.errors import UnusableInput
from asterism.configs.load import load_run
from asterism.configs.schema.run_config import RunConfig
from asterism.engine.hf.model_config import DecoderConfig, load_model_config
from asterism.tasks.prepare_program import find_prepared_model

_GPUS_PER_NODE = 8
EXIT_DOES_NOT_FIT = 1


class PlanOptions(NamedTuple):
    """Arguments of the command. Without `gpu` the plan is for this machine."""

    gpu: str | None = None
    gpus: int | None = None  # number of GPUs per node; with `gpu` 8 by default
    nodes: int | None = None
    gpu_memory_gib: float | None = None
    host_memory_gib: float | None = None
    shared_memory_gib: float | None = None
    disk_gib: float | None = None
    mfu: float = Assumptions().mfu
    mean_tokens_share: float = Assumptions().mean_tokens_share
    gpu_reserve_gib: float = Assumptions().gpu_reserve_gib
    measures: bool = False
    json_file: Path | None = None


def print_plan(config: Path, overrides: Sequence[str], options: PlanOptions, console: Console) -> int:
    """Print the plan and return the exit code. Raises UnusableInput."""
    check_json_path(options.json_file)
    run = load_run(config, overrides)
    machines = choose_machines(run, options)
    assumptions = Assumptions(options.mfu, options.mean_tokens_share, options.gpu_reserve_gib)
    plan = build_plan(PlanInputs(run, find_model_config(run), machines, assumptions))
    console.print(build_plan_tables(plan), soft_wrap=True)
    write_json(options.json_file, plan)
    return EXIT_DOES_NOT_FIT if plan.shortfalls else 0


def plan_local_run(run: RunConfig) -> RunPlan:
    """Plan the run on this machine. Raises UnusableInput."""
    return build_plan(PlanInputs(run, find_model_config(run), detect_machine(run)))


def find_model_config(run: RunConfig) -> DecoderConfig:
    """Return the configuration of model.checkpoint, which may lack weights, or of the model that the run has yet to make.

    Raises UnusableInput with the key.
    """
    folder = resolve_checkpoint(run)
    if folder is None:
        model = find_prepared_model(run)
        assert model is not None  # the check refuses a program without a model
        return model
    try:
        return load_model_config(folder)
    except UnusableInput as error:
        remedy = "set it to the folder of a supported model (docs/models.md)"
        raise UnusableInput(f"model.checkpoint: {error}; {remedy}") from error


def choose_machines(run: RunConfig, options: PlanOptions) -> PlannedMachines:
    """Return this machine, or machines with the named GPU, with the sizes of the options. Raises UnusableInput."""
    if options.gpu is None:
        if options.gpus is not None:
            raise UnusableInput(f"--gpus: name the GPU with --gpu; known are {', '.join(GPUS)}")
        machines = detect_machine(run, measures=options.measures)
    else:
        machines = _describe_machines(run, options)
    gpu = machines.gpu
    if options.gpu_memory_gib is not None:
        if gpu is None:
            raise UnusableInput(f"--gpu-memory-gib: name the GPU with --gpu; known are {', '.join(GPUS)}")
        gpu = replace(gpu, memory_bytes=options.gpu_memory_gib * GIB)
    sizes = {
        "host_memory_bytes": options.host_memory_gib,
        "shared_memory_bytes": options.shared_memory_gib,
        "disk_bytes": options.disk_gib,
    }
    given = {name: size * GIB for name, size in sizes.items() if size is not None}
    return replace(machines, gpu=gpu, nodes=options.nodes or machines.nodes, **given)


def _describe_machines(run: RunConfig, options: PlanOptions) -> PlannedMachines:
    if options.gpu not in GPUS:
        raise UnusableInput(f"--gpu {options.gpu}: unknown GPU; known are {', '.join(GPUS)}")
    if options.measures:
        raise UnusableInput("--measure: measures this machine; leave out --gpu")
    return PlannedMachines(gpus=options.gpus or _GPUS_PER_NODE, gpu=GPUS[options.gpu], nodes=run.cluster.nodes)

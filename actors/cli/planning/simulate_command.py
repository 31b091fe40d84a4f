"""`asterism simulate` compares policies on one generated or recorded step, in virtual time."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, cast, get_args

from msgspec.structs import replace
from rich.console import Console

from asterism.actors.cli.console import make_console, write_json
from asterism.analysis.simulation.cluster_model import CLUSTERS, SimulatedCluster
from asterism.analysis.simulation.log_recorder import LogRecorder
from asterism.analysis.simulation.outcome import SimulatedPolicy, SimulationOutcome
from asterism.analysis.simulation.recorded_workload import RecordedStep, load_recorded_step
from asterism.analysis.simulation.result_table import build_outcomes_table
from asterism.analysis.simulation.simulate import simulate
from asterism.analysis.simulation.workload import Workload
from asterism.analysis.simulation.workloads import SHAPES, draw_named_workload
from asterism.configs.errors import UnusableInput
from asterism.configs.run_folder import RunFolder
from asterism.policies.arbiter.arbiter import PolicyName

_PROGRESS_INTERVAL_S = 5.0
POLICIES: tuple[SimulatedPolicy, ...] = (*get_args(PolicyName), "oracle")


class ProgressLines:
    """A printer of progress. A line is due only every few seconds, since a step of the report's size takes minutes."""

    def __init__(self, policy: str, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` returns seconds."""
        self._policy, self._console, self._clock = policy, console, clock
        self._due_s = clock() + _PROGRESS_INTERVAL_S

    def __call__(self, virtual_s: float, num_ended: int, num_trajectories: int) -> None:
        if self._clock() >= self._due_s:
            self._due_s = self._clock() + _PROGRESS_INTERVAL_S
            counts = (
                f"{num_ended:,} of {num_trajectories:,} trajectories ended after {virtual_s:,.0f} s of virtual time"
            )
            self._console.print(f"{self._policy}: {counts}", markup=False, highlight=False, soft_wrap=True)


class SimulateOptions(NamedTuple):
    """Arguments of the command. `workload` is a preset's name, or the folder of a run."""

    workload: str
    policies: str
    seed: int = 0
    scale: float = 1.0
    step: int | None = None
    cluster: str | None = None
    json_file: Path | None = None
    picture: Path | None = None
    run: Path | None = None


class _SimulatedStep(NamedTuple):
    workload: Workload
    cluster: SimulatedCluster
    recorded: RecordedStep | None


def simulate_workload(options: SimulateOptions, console: Console) -> None:
    """Simulate, print and write. Raises UnusableInput."""
    policies = _parse_policies(options.policies)
    step = _load_step(options)
    folders = _choose_log_folders(options.run, policies)
    outcomes = [_simulate_policy(step, policy, options.seed, folders[policy]) for policy in policies]
    console.print(build_outcomes_table(outcomes))
    _print_remarks(step.recorded, console)
    try:
        _write(outcomes, options)
    except OSError as error:
        raise UnusableInput(str(error)) from error
    for folder in filter(None, folders.values()):
        console.print(f"logs: {folder.path} (asterism report {folder.path})", markup=False, soft_wrap=True)


def _simulate_policy(
    step: _SimulatedStep, policy: SimulatedPolicy, seed: int, folder: RunFolder | None
) -> SimulationOutcome:
    recording = None if folder is None else LogRecorder(folder.logs)
    try:
        outcome = simulate(
            step.workload,
            step.cluster,
            policy,
            seed,
            recording,
            on_progress=ProgressLines(policy, make_console(stderr=True)),
        )
    except (ValueError, OSError) as error:
        raise UnusableInput(str(error)) from error
    if step.recorded is not None and policy == step.recorded.policy:
        return replace(outcome, measured_s=step.recorded.measured_s)
    return outcome


def _print_remarks(recorded: RecordedStep | None, console: Console) -> None:
    if recorded is None:
        return
    if recorded.left_out:
        console.print(f"{recorded.left_out} failed or aborted trajectories are excluded.")
    if recorded.overlaps:
        console.print("In the run other steps overlapped with this one (rl.max_staleness); only this one is simulated.")


# ---------------------------------------------------------------- arguments


def _load_step(options: SimulateOptions) -> _SimulatedStep:
    if options.cluster is not None and options.cluster not in CLUSTERS:
        raise UnusableInput(f"--cluster {options.cluster}: unknown cluster; known are {', '.join(CLUSTERS)}")
    if options.workload in SHAPES:
        if options.step is not None:
            raise UnusableInput(
                f"--step: only a recorded run has steps; for another {options.workload} workload use --seed"
            )
        workload, cluster = draw_named_workload(options.workload, options.seed, options.scale)
        return _SimulatedStep(workload, _choose_cluster(options, cluster), None)
    path = Path(options.workload)
    if not path.is_dir():
        raise UnusableInput(
            f"{options.workload}: neither a run folder nor a workload; workloads are {', '.join(SHAPES)}"
        )
    if options.scale != 1.0 or options.seed:
        flag = "--scale" if options.scale != 1.0 else "--seed"
        raise UnusableInput(f"{flag}: only for generated workloads; {options.workload} is a recorded run")
    recorded = load_recorded_step(RunFolder(path), options.step)
    return _SimulatedStep(
        recorded.workload, _choose_cluster(options, recorded.cluster), recorded if options.cluster is None else None
    )


def _choose_cluster(options: SimulateOptions, default: SimulatedCluster) -> SimulatedCluster:
    return CLUSTERS[options.cluster] if options.cluster is not None else default


def _parse_policies(names: str) -> list[SimulatedPolicy]:
    if names == "all":
        return list(POLICIES)
    chosen = list(dict.fromkeys(name.strip() for name in names.split(",")))
    for name in chosen:
        if name not in POLICIES:
            raise UnusableInput(f"--policies: unknown policy {name!r}; known are {', '.join(POLICIES)}, and all")
    return cast(list[SimulatedPolicy], chosen)


def _choose_log_folders(
    run: Path | None, policies: Sequence[SimulatedPolicy]
) -> dict[SimulatedPolicy, RunFolder | None]:
    """Return the log folder of each policy: `run` itself, or a subfolder per policy."""
    if run is None:
        return dict.fromkeys(policies)
    folders: dict[SimulatedPolicy, RunFolder | None] = {}
    for policy in policies:
        folder = folders[policy] = RunFolder(run / policy if len(policies) > 1 else run)
        if folder.config.exists():
            raise UnusableInput(f"--run {folder.path}: is the folder of a real run; name another")
        if folder.path.exists() and not folder.path.is_dir():
            raise UnusableInput(f"--run {folder.path}: is not a folder")
    return folders


# ---------------------------------------------------------------- results


def _write(outcomes: Sequence[SimulationOutcome], options: SimulateOptions) -> None:
    write_json(options.json_file, outcomes)
    if options.picture is not None:
        from asterism.analysis.simulation.simulation_figure import draw_outcomes  # matplotlib is slow to import

        draw_outcomes(outcomes, options.picture)

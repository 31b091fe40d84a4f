"""`asterism simulate`: policies side by side on one step, drawn or recorded, in virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, cast, get_args

import msgspec
from msgspec.structs import replace
from rich.console import Console

from analysis.simulation.model import CLUSTERS, Cluster
from analysis.simulation.outcome import Outcome, Policy
from analysis.simulation.recorded import RecordedStep, recorded_step
from analysis.simulation.run import simulate
from analysis.simulation.table import outcomes_table
from analysis.simulation.workload import Workload
from analysis.simulation.workloads import SHAPES, named
from analysis.utilization.recording import Recording
from configs.errors import UnusableInput
from configs.run_folder import RunFolder
from policies.scheduling import PolicyName

POLICIES: tuple[Policy, ...] = (*get_args(PolicyName), "oracle")


class Options(NamedTuple):
    """What the command line says. `workload`: a name, or the folder of a run."""

    workload: str
    policies: str
    seed: int = 0
    scale: float = 1.0
    step: int | None = None
    cluster: str | None = None
    json_file: Path | None = None
    picture: Path | None = None
    run: Path | None = None


class _Step(NamedTuple):
    workload: Workload
    cluster: Cluster
    recorded: RecordedStep | None


def simulate_workload(options: Options, console: Console) -> None:
    """Raises UnusableInput."""
    policies = _policies(options.policies)
    step = _step(options)
    folders = _folders(options.run, policies)
    outcomes = [_simulated(step, policy, options.seed, folders[policy]) for policy in policies]
    console.print(outcomes_table(outcomes))
    _tell(step.recorded, console)
    try:
        _write(outcomes, options)
    except OSError as error:
        raise UnusableInput(str(error)) from error
    for folder in filter(None, folders.values()):
        console.print(f"logs: {folder.path} (asterism report {folder.path})", markup=False, soft_wrap=True)


def _simulated(step: _Step, policy: Policy, seed: int, folder: RunFolder | None) -> Outcome:
    recording = None if folder is None else Recording(folder.logs)
    try:
        outcome = simulate(step.workload, step.cluster, policy, seed, recording)
    except (ValueError, OSError) as error:
        raise UnusableInput(str(error)) from error
    if step.recorded is not None and policy == step.recorded.policy:
        return replace(outcome, measured_s=step.recorded.measured_s)
    return outcome


def _tell(recorded: RecordedStep | None, console: Console) -> None:
    if recorded is None:
        return
    if recorded.left_out:
        console.print(f"{recorded.left_out} trajectories that failed or were aborted are left out.")
    if recorded.overlaps:
        console.print("Other steps ran beside this one (rl.max_staleness); it is simulated alone.")


# ---------------------------------------------------------------- what is asked for


def _step(options: Options) -> _Step:
    if options.cluster is not None and options.cluster not in CLUSTERS:
        raise UnusableInput(f"--cluster: no cluster {options.cluster!r}; there are {', '.join(CLUSTERS)}")
    if options.workload in SHAPES:
        if options.step is not None:
            raise UnusableInput(f"--step: {options.workload} is drawn, not recorded; --seed draws another step")
        workload, cluster = named(options.workload, options.seed, options.scale)
        return _Step(workload, _cluster(options, cluster), None)
    path = Path(options.workload)
    if not path.is_dir():
        raise UnusableInput(f"{options.workload}: neither a run's folder nor a workload; there are {', '.join(SHAPES)}")
    if options.scale != 1.0 or options.seed:
        flag = "--scale" if options.scale != 1.0 else "--seed"
        raise UnusableInput(f"{flag}: nothing is drawn where a recorded run is simulated ({options.workload})")
    recorded = recorded_step(RunFolder(path), options.step)
    return _Step(recorded.workload, _cluster(options, recorded.cluster), recorded if options.cluster is None else None)


def _cluster(options: Options, usual: Cluster) -> Cluster:
    return CLUSTERS[options.cluster] if options.cluster is not None else usual


def _policies(names: str) -> list[Policy]:
    """Each once; `all` is all of them."""
    if names == "all":
        return list(POLICIES)
    chosen = list(dict.fromkeys(name.strip() for name in names.split(",")))
    for name in chosen:
        if name not in POLICIES:
            raise UnusableInput(f"--policies: no policy {name!r}; there are {', '.join(POLICIES)}, and all")
    return cast(list[Policy], chosen)


def _folders(run: Path | None, policies: Sequence[Policy]) -> dict[Policy, RunFolder | None]:
    """Where each policy's logs go: into the folder itself, or of several into a folder for each below it."""
    if run is None:
        return dict.fromkeys(policies)
    folders: dict[Policy, RunFolder | None] = {}
    for policy in policies:
        folder = folders[policy] = RunFolder(run / policy if len(policies) > 1 else run)
        if folder.config.exists():
            raise UnusableInput(f"--run {folder.path}: a real run lies there")
        if folder.path.exists() and not folder.path.is_dir():
            raise UnusableInput(f"--run {folder.path}: is no folder")
    return folders


# ---------------------------------------------------------------- what comes of it


def _write(outcomes: Sequence[Outcome], options: Options) -> None:
    if options.json_file is not None:
        options.json_file.write_bytes(msgspec.json.format(msgspec.json.encode(outcomes), indent=2) + b"\n")
    if options.picture is not None:
        from analysis.simulation.picture import draw_outcomes  # matplotlib: when there is something to draw

        draw_outcomes(outcomes, options.picture)

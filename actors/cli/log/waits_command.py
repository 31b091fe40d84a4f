"""`asterism log waits` lists what each process and trajectory waits for, and since when.

A replay of the deciders' logs gives the states from which the waits follow. For a stalled run, the
launcher starts `python -m asterism.actors.cli.log.waits_command RUN`, so that the replay does not block it.
"""

import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import msgspec

from asterism.actors.cli.console import escape_controls
from asterism.actors.replay.replay import find_log, list_batches, redecide_complete_launches
from asterism.actors.runtime.wiring import build_deciders
from asterism.bus.addresses import ARBITER, BUFFER, HEAD, LEARNER, RECIPE, ROLLOUT
from asterism.bus.event_log.reader import read_events
from asterism.bus.event_log.records import Event
from asterism.bus.messages import GpuMemoryRequested, RunFinished, RunStarted, StepRequested, WeightsPublished
from asterism.configs.errors import UnusableInput
from asterism.configs.load import load_run
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.run_config import RunConfig
from asterism.policies.groups.group_buffer import GroupBuffer
from asterism.policies.recipe import Recipe
from asterism.policies.rollout.rollout import Rollout
from asterism.policies.rollout.trajectory import Trajectory

_MAX_IDS_SHOWN = 5  # limit of trajectory numbers in one line


class PendingWait(msgspec.Struct, frozen=True):
    waiter: str
    awaited: str
    reason: str
    since: float  # seconds since the epoch

    def describe(self, now: float) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(self.since))
        verb = "wait" if self.waiter.startswith("trajectories") else "waits"
        return f"{self.waiter} {verb} for {self.awaited}: {self.reason}, since {clock} ({now - self.since:.1f} s)"


def find_waits(run: RunConfig, folder: RunFolder) -> list[PendingWait]:
    """Return the waits, the longest first. Raises UnusableInput if there is no log."""
    waits = [*_find_trajectory_waits(run, folder)]
    if not run.evaluation.only:  # the head of an evaluation waits only for trajectories
        waits += _find_head_waits(run, folder)
    return sorted(waits, key=lambda wait: wait.since)


# ---------------------------------------------------------------- trajectories


def _find_trajectory_waits(run: RunConfig, folder: RunFolder) -> Iterator[PendingWait]:
    deciders = build_deciders(ROLLOUT, run, folder)
    rollout = deciders[ROLLOUT]
    assert isinstance(rollout, Rollout)
    for _ in redecide_complete_launches(find_log(folder, ROLLOUT), deciders):
        pass
    waiting: defaultdict[tuple[str, str], list[Trajectory]] = defaultdict(list)
    for trajectory in rollout.trajectories.values():
        waiting[_describe_awaited(trajectory)].append(trajectory)
    for (awaited, reason), trajectories in waiting.items():
        trajectories.sort(key=lambda trajectory: trajectory.since)
        yield PendingWait(_format_trajectory_ids(trajectories), awaited, reason, trajectories[0].since)


def _describe_awaited(trajectory: Trajectory) -> tuple[str, str]:
    """Return the process that the trajectory waits for, and the reason."""
    match trajectory.phase:
        case "leasing":
            return ARBITER, "a lease"
        case "generating":
            return trajectory.engine, "a turn"
        case "calling":
            return trajectory.executor or "an executor to join", "a tool call"
        case _:
            return trajectory.executor or "an executor to join", "a grading"


def _format_trajectory_ids(trajectories: list[Trajectory]) -> str:
    numbers = [str(trajectory.trajectory_id) for trajectory in trajectories[:_MAX_IDS_SHOWN]]
    more = f" and {len(trajectories) - _MAX_IDS_SHOWN} more" if len(trajectories) > _MAX_IDS_SHOWN else ""
    return f"trajectories {', '.join(numbers)}{more}"


# ---------------------------------------------------------------- the head


def _find_head_waits(run: RunConfig, folder: RunFolder) -> Iterator[PendingWait]:
    deciders = build_deciders(HEAD, run, folder)
    buffer, recipe = deciders["buffer"], deciders["recipe"]
    assert isinstance(buffer, GroupBuffer)
    assert isinstance(recipe, Recipe)
    published, started, wanted = 0.0, 0.0, 0.0
    requested: dict[int, float] = {}  # step -> time at which its request was logged, in seconds
    batches: dict[int, float] = {}  # step -> time at which the learner received its batch, in seconds
    for event, done in redecide_complete_launches(find_log(folder, HEAD), deciders):
        at = event.time
        if isinstance(done.message, RunStarted):
            published = started = at
            batches.clear()
        elif isinstance(done.message, WeightsPublished):
            published = at
        elif isinstance(done.message, StepRequested):
            requested[done.message.step] = at
        elif isinstance(done.message, GpuMemoryRequested):
            wanted = at
        batches.update({batch.step: at for batch in list_batches(done)})
    for name in recipe.state.awake_engines:
        yield PendingWait(LEARNER, name, "the release of its GPU memory", wanted)
    evaluations = recipe.state.step_evaluations
    version = evaluations.held[0].version if evaluations and evaluations.held else recipe.state.version
    for name, engine in recipe.state.engines.items():
        if engine.loaded_version < version:
            yield PendingWait(RECIPE, name, f"weights of version {version}", published)
    if not recipe.state.engines:
        yield PendingWait(RECIPE, "a generator", "none has joined", published)
    if version < 0:
        yield PendingWait(RECIPE, LEARNER, "the cold start, or its checkpoint", started)
    for step, at in batches.items():
        if step > recipe.state.last_trained_step:
            yield PendingWait(RECIPE, LEARNER, f"step {step}", at)
    for collection in buffer.state.steps.values():
        missing = sum(group.start.size for group in collection.open_groups.values())
        ended = sum(len(group.finished) + len(group.failed) for group in collection.open_groups.values())
        if collection.open_groups:
            reason = f"{len(collection.open_groups)} groups of step {collection.step}, {missing - ended} trajectories"
            yield PendingWait(BUFFER, ROLLOUT, reason, requested.get(collection.step, started))


def print_waits(folder: RunFolder) -> None:
    """Print the waits. A finished run has no waits; its logs are not replayed, because a replay takes a minute."""
    launch = _read_last_launch(find_log(folder, HEAD))
    is_finished = launch is not None and launch.kind == RunFinished.__name__
    waits = [] if is_finished else find_waits(load_run(folder.config), folder)
    for wait in waits:
        sys.stdout.write(escape_controls(wait.describe(time.time())) + "\n")
    if not waits:
        sys.stdout.write(f"no actor waits; {_describe_launch(launch)}\n")


def _read_last_launch(log: Path) -> Event | None:
    """Return the last event RunStarted or RunFinished, or None without either."""
    launches = [event for event, _ in read_events(log, kinds=[RunStarted.__name__, RunFinished.__name__])]
    return launches[-1] if launches else None


def _describe_launch(launch: Event | None) -> str:
    if launch is None:
        return "the run has not started"
    verb = "ended" if launch.kind == RunFinished.__name__ else "started"
    return f"the run {verb} at {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(launch.time))}"


if __name__ == "__main__":
    try:
        print_waits(RunFolder(Path(sys.argv[1])))
    except UnusableInput as error:
        sys.exit(str(error))

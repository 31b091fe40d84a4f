"""Who waits for what, and since when, by the event logs: `asterism log waits RUN`, and the word of a run that stalls.

The deciders decide again on all that was logged; where they stand then is who waits. `python -m actors.waits RUN` is what
the launcher starts for it, so that a long log holds nobody up.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from actors.replay import Done, batches_of, decide_all_again, whole_since
from actors.wiring import HEAD, LEARNER, ROLLOUT, deciders_of
from bus.event_reading import check_whole
from bus.messages import MemoryWanted, RunStarted, StepRequested, WeightsPublished
from configs.errors import UnusableInput
from configs.load import load_resolved
from configs.run_folder import RunFolder
from configs.schema import Run
from policies.decider import Decider
from policies.group_buffer import GroupBuffer
from policies.recipe import Recipe
from policies.rollout import Rollout
from policies.trajectory import Trajectory

_SHOWN = 5  # trajectories that a line names


class Wait(msgspec.Struct, frozen=True):
    who: str
    whom: str
    what: str
    since: float  # seconds since the epoch

    def told(self, now: float) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(self.since))
        verb = "wait" if self.who.startswith("trajectories") else "waits"
        return f"{self.who} {verb} for {self.whom}: {self.what}, since {clock} ({now - self.since:.1f} s)"


def waits_of(run: Run, folder: RunFolder) -> list[Wait]:
    """The longest first. Raises UnusableInput where there is no log."""
    found = [*_of_trajectories(run, folder), *_of_the_head(run, folder)]
    return sorted(found, key=lambda wait: wait.since)


# ---------------------------------------------------------------- trajectories


def _of_trajectories(run: Run, folder: RunFolder) -> Iterator[Wait]:
    deciders = deciders_of(ROLLOUT, run, folder)
    rollout = deciders[ROLLOUT]
    assert isinstance(rollout, Rollout)
    for _ in _decided_again(ROLLOUT, folder, deciders):
        pass
    waiting: defaultdict[tuple[str, str], list[Trajectory]] = defaultdict(list)
    for trajectory in rollout.trajectories.values():
        waiting[_awaited(trajectory)].append(trajectory)
    for (whom, what), trajectories in waiting.items():
        trajectories.sort(key=lambda trajectory: trajectory.since)
        yield Wait(_named(trajectories), whom, what, trajectories[0].since)


def _awaited(trajectory: Trajectory) -> tuple[str, str]:
    """For whom it waits, and for what."""
    match trajectory.phase:
        case "leasing":
            return f"{HEAD}/arbiter", "a lease"
        case "generating":
            return trajectory.engine, "a turn"
        case "calling":
            return trajectory.executor or "an executor to join", "a tool call"
        case _:
            return trajectory.executor or "an executor to join", "a grading"


def _named(trajectories: list[Trajectory]) -> str:
    numbers = [str(trajectory.trajectory_id) for trajectory in trajectories[:_SHOWN]]
    more = f" and {len(trajectories) - _SHOWN} more" if len(trajectories) > _SHOWN else ""
    return f"trajectories {', '.join(numbers)}{more}"


# ---------------------------------------------------------------- the head


def _of_the_head(run: Run, folder: RunFolder) -> Iterator[Wait]:
    deciders = deciders_of(HEAD, run, folder)
    buffer, recipe = deciders["buffer"], deciders["recipe"]
    assert isinstance(buffer, GroupBuffer)
    assert isinstance(recipe, Recipe)
    published, began, wanted = 0.0, 0.0, 0.0
    requested: dict[int, float] = {}  # by step
    batches: dict[int, float] = {}  # by step: when it went to the learner
    for at, done in _decided_again(HEAD, folder, deciders):
        if isinstance(done.message, RunStarted):
            published = began = at
            batches.clear()
        elif isinstance(done.message, WeightsPublished):
            published = at
        elif isinstance(done.message, StepRequested):
            requested[done.message.step] = at
        elif isinstance(done.message, MemoryWanted):
            wanted = at
        batches.update({batch.step: at for batch in batches_of(done)})
    for name in recipe.state.unrested:
        yield Wait(LEARNER, name, "it has not given its memory back", wanted)
    version = recipe.state.version
    for name, engine in recipe.state.engines.items():
        if engine.holds < version:
            yield Wait("head/recipe", name, f"it has not loaded version {version}", published)
    if not recipe.state.engines:
        yield Wait("head/recipe", "a generator", "none is there", published)
    if version < 0:
        yield Wait("head/recipe", LEARNER, "the cold start, or its checkpoint", began)
    for step, at in batches.items():
        if step > recipe.state.trained:
            yield Wait("head/recipe", LEARNER, f"step {step}", at)
    for collection in buffer.state.steps.values():
        missing = sum(group.start.size for group in collection.open.values())
        ended = sum(len(group.finished) + len(group.failed) for group in collection.open.values())
        if collection.open:
            what = f"{len(collection.open)} groups of step {collection.step}, {missing - ended} trajectories"
            yield Wait("head/buffer", ROLLOUT, what, requested.get(collection.step, began))


def _decided_again(process: str, folder: RunFolder, deciders: Mapping[str, Decider]) -> Iterator[tuple[float, Done]]:
    """When, and what. Raises UnusableInput where there is no log, or log.keep_steps has removed what the deciders follow
    from."""
    path = folder.events / f"{process}.sqlite"
    if not path.exists():
        raise UnusableInput(f"{path}: there is no event log; was the run started with log.events = false?")
    num_decided = 0
    for event, _, done in decide_all_again(path, deciders, since=whole_since(path)):
        num_decided += 1
        yield event.time, done
    if not num_decided:
        check_whole(path, since=1)


def tell_waits(folder: RunFolder) -> None:
    for wait in waits_of(load_resolved(folder.config), folder):
        sys.stdout.write(wait.told(time.time()) + "\n")


if __name__ == "__main__":
    try:
        tell_waits(RunFolder(Path(sys.argv[1])))
    except UnusableInput as error:
        sys.exit(str(error))

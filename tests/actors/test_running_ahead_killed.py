"""A whole run over real processes whose rollouts run ahead of the learner, killed with `kill -9` in the middle and gone on
with: what each step trained on, told by feeding the head's log to the group buffer again."""

from __future__ import annotations

import json
from collections import Counter
from itertools import chain
from typing import NamedTuple

import msgspec
import numpy as np
import pytest

from actors.wiring import HEAD, deciders_of
from bus.codec import decode
from bus.event_reading import read_events
from bus.messages import (
    AnyMessage,
    BatchReady,
    LeaseRequested,
    RunStarted,
    StartGroup,
    StepCollected,
    StepRequested,
    TrajectoryAborted,
    TrajectoryFailed,
    TrajectoryFinished,
)
from configs.load import load_resolved
from configs.run_folder import RunFolder
from engine.batches import check_versions
from engine.snapshots import steps_saved
from tests.actors.running import Start, adds_up, finish, from_cold_start_of, metrics, until

pytestmark = pytest.mark.slow

STEPS, AHEAD = 4, 1
SETTINGS = (
    *(f"rl.steps={STEPS}", "rl.prompts=4", "rl.rollouts=8", "evaluation.questions=2"),
    *(f"rl.max_staleness={AHEAD}", "rl.oversubscribe=1.5", "rl.leftovers=carry"),
)


class Life(msgspec.Struct):
    """One of the run's, as its group buffer saw it."""

    began: RunStarted
    started: list[StartGroup] = []  # for training
    ended: list[int] = []  # trajectories, in their order
    collected: list[StepCollected] = []
    batches: list[BatchReady] = []
    ends_before: dict[int, int] = {}  # by step: how many trajectories had ended when it was collected

    def ended_by(self, step: int) -> set[int]:
        """Trajectories that had ended when the step was collected."""
        return set(self.ended[: self.ends_before[step]])


class Killed(NamedTuple):
    folder: RunFolder
    first: Life
    second: Life

    @property
    def step(self) -> int:
        """After which it went on."""
        return self.second.began.step

    @property
    def trained(self) -> list[BatchReady]:
        """What the learner's last checkpoint comes from: of the first life what lies before the one that it went on
        from."""
        return [*(batch for batch in self.first.batches if batch.step <= self.step), *self.second.batches]


def lives_of(folder: RunFolder) -> list[Life]:
    buffer = deciders_of(HEAD, load_resolved(folder.config), folder)["buffer"]
    lives: list[Life] = []
    for event, _ in read_events(folder.events / "head.sqlite"):
        if event.actor != "buffer":
            continue
        message = decode(event.frame).message
        if isinstance(message, RunStarted):
            lives.append(Life(message))
        if isinstance(message, TrajectoryFinished | TrajectoryFailed | TrajectoryAborted):
            lives[-1].ended.append(message.trajectory_id)
        for effect in buffer.decide(event.time, message):
            _note(lives[-1], effect.message)
    return lives


def _note(life: Life, effect: AnyMessage) -> None:
    match effect:
        case StartGroup(purpose="train"):
            life.started.append(effect)
        case BatchReady():
            life.batches.append(effect)
        case StepCollected():
            if effect.step not in life.ends_before:  # it has two receivers
                life.collected.append(effect)
                life.ends_before[effect.step] = len(life.ended)
        case _:
            pass


def works_for(folder: RunFolder, step: int) -> bool:
    """Whether the logs tell of a trajectory that was begun after the step had been asked for: of the last moments before
    a kill they do not."""
    if not metrics(folder, "step"):
        return False
    requested = False
    for event, _ in read_events(folder.events / "head.sqlite", kinds=["StepRequested", "LeaseRequested"]):
        message = decode(event.frame).message
        requested = requested or (isinstance(message, StepRequested) and message.step == step)
        if requested and isinstance(message, LeaseRequested) and message.lease == 1:
            told = read_events(folder.events / "rollout-0.sqlite", trajectory=message.trajectory_id)
            return any(True for _ in told)
    return False


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory, start: Start, finished_run: tuple[RunFolder, str]) -> Killed:
    """While the learner trains the second step, and rollouts work for the third. From the other run's cold start."""
    runs = tmp_path_factory.mktemp("killed")
    folder = RunFolder(runs / "demo")
    words = (*SETTINGS, *from_cold_start_of(finished_run[0]))
    process = start(runs, *words)
    until(lambda: works_for(folder, step=3), process)
    process.kill()
    finish(process)
    resumed = start(runs, *words, "--resume")
    output = finish(resumed)
    assert resumed.returncode == 0, output
    first, second = lives_of(folder)
    return Killed(folder, first, second)


def test_it_goes_on_after_the_last_step_of_which_checkpoint_and_record_are_there(killed: Killed) -> None:
    collected = {each.step: each.cursor for each in killed.first.collected}
    assert killed.step in (1, 2)
    assert killed.second.began.cursor == collected[killed.step]
    assert STEPS in steps_saved(killed.folder.checkpoints)


def test_each_step_is_trained_once_and_no_trajectory_twice(killed: Killed) -> None:
    assert [batch.step for batch in killed.trained] == list(range(1, STEPS + 1))
    rows = [row for batch in killed.trained for row in batch.rows]
    assert len(rows) == len({row.trajectory_id for row in rows}) > 0
    groups = {group.group_id: group for life in (killed.first, killed.second) for group in life.started}
    by_step = [{groups[row.group_id].seed for row in batch.rows} for batch in killed.trained]
    assert max(Counter(chain.from_iterable(by_step)).values()) == 1  # nor a problem, at its place in the sequence


def test_the_groups_that_were_under_way_are_begun_anew_first_and_nothing_else_is(killed: Killed) -> None:
    """A problem's place in the sequence gives its group's seed; the first life began them from the first place on."""
    cursor = killed.second.began.cursor
    before, after = killed.first.started, killed.second.started
    assert cursor.pending or killed.step > 1  # the second step was under way when the first was collected
    again = [before[position] for position in cursor.pending]
    begun = after[: len(again)]
    assert [(group.problem, group.seed) for group in begun] == [(group.problem, group.seed) for group in again]
    assert [group.group_id for group in after[:1]] == [cursor.next_group_id]
    assert min(group.first_trajectory_id for group in after) == cursor.next_trajectory_id
    done = {group.seed for place, group in enumerate(before[: cursor.position]) if place not in cursor.pending}
    assert done.isdisjoint(group.seed for group in after)
    seeds = [*done, *(group.seed for group in after)]
    assert len(seeds) == len(set(seeds))


def test_no_group_is_lost_that_is_not_begun_anew(killed: Killed) -> None:
    """Of all others every trajectory had ended when the step was collected that the run went on after."""
    cursor = killed.second.began.cursor
    ended = killed.first.ended_by(killed.step)
    for place, group in enumerate(killed.first.started[: cursor.position]):
        ids = range(group.first_trajectory_id, group.first_trajectory_id + group.size)
        assert place in cursor.pending or ended.issuperset(ids)


def test_what_is_trained_on_is_of_the_versions_that_its_step_may_use(killed: Killed) -> None:
    """And, after the kill, of none before the checkpoint: what the first life had begun is not used."""
    for batch in killed.trained:
        check_versions(batch.rows, batch.step, AHEAD)
    behind: set[int] = set()
    for batch in killed.second.batches:
        for row in batch.rows:
            counted = np.frombuffer(row.loss_mask, np.uint8).astype(bool)
            versions = np.frombuffer(row.versions, np.int32)[counted]
            assert versions.min() >= killed.step
            behind |= set((batch.step - 1 - versions).tolist())
    assert behind == {0, 1}


def test_each_step_has_one_line_and_its_counts_are_those_of_its_batch(killed: Killed) -> None:
    steps = metrics(killed.folder, "step")
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    for line, batch in zip(steps, killed.trained, strict=True):
        counted = [np.frombuffer(row.loss_mask, np.uint8).astype(bool) for row in batch.rows]
        versions = [np.frombuffer(row.versions, np.int32)[mask] for row, mask in zip(batch.rows, counted, strict=True)]
        behind = batch.step - 1 - np.concatenate(versions) if versions else np.zeros(1)
        assert line["rows"] == len(batch.rows)
        assert line["staleness_max"] == behind.max()
        assert line["staleness_mean"] == pytest.approx(behind.mean())


def test_the_runs_numbers_add_up_and_its_two_lives_replay(killed: Killed) -> None:
    summary = json.loads(killed.folder.summary.read_text())
    assert adds_up(summary, "aborted")
    assert summary["trajectories_abandoned"] > 0
    assert summary["steps"] == STEPS
    assert summary["replay_identical"] is True

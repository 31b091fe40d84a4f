"""A run with rollouts ahead of the learner is killed with `kill -9` and resumed.

A replay of the head's log in the group buffer recomputes the training samples of each step.
"""

import json
from collections import Counter
from itertools import chain
from typing import NamedTuple

import msgspec
import numpy as np
import pytest

from asterism.actors.runtime.wiring import build_deciders
from asterism.bus import messages as msg
from asterism.bus.addresses import HEAD
from asterism.bus.codec import decode
from asterism.bus.event_log.reader import read_events
from asterism.configs.load import load_run
from asterism.configs.run_folder import RunFolder
from asterism.engine.learner.checkpoints.checkpoint_folders import list_saved_steps
from asterism.policies.groups.staleness import check_versions
from tests.actors.runs.running import Start, from_cold_start_of, is_conserved, metrics
from tests.batches import BatchAssembler, CompleteBatch

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

STEPS, AHEAD = 4, 1
SETTINGS = (
    *(f"rl.steps={STEPS}", "rl.prompts=4", "rl.rollouts=8", "evaluation.questions=2"),
    *(f"rl.max_staleness={AHEAD}", "rl.group_oversampling=1.5", "rl.surplus_groups=carry"),
)


class LaunchRecord(msgspec.Struct):
    """A launch of the run, as its group buffer logged it."""

    began: msg.RunStarted
    started: list[msg.StartGroup] = []  # started training groups
    ended: list[int] = []  # trajectory ids, in order of their ends
    collected: list[msg.StepCollected] = []
    batches: list[CompleteBatch] = []
    groups: BatchAssembler = msgspec.field(default_factory=BatchAssembler)
    ends_before: dict[int, int] = {}  # step -> trajectories that had ended when the step was collected

    def list_ended_by(self, step: int) -> set[int]:
        """Return the trajectories that had ended when the step was collected."""
        return set(self.ended[: self.ends_before[step]])


class Killed(NamedTuple):
    folder: RunFolder
    first: LaunchRecord
    second: LaunchRecord

    @property
    def step(self) -> int:
        """Return the step after which the run resumed."""
        return self.second.began.step

    @property
    def trained(self) -> list[CompleteBatch]:
        """Return the batches of the last checkpoint: the first launch's up to the resumed step, then the second's."""
        return [*(batch for batch in self.first.batches if batch.step <= self.step), *self.second.batches]


def read_launches(folder: RunFolder) -> list[LaunchRecord]:
    buffer = build_deciders(HEAD, load_run(folder.config), folder)["buffer"]
    launches: list[LaunchRecord] = []
    for event, _ in read_events(folder.events / "head.sqlite"):
        if event.actor != "buffer":
            continue
        message = decode(event.frame).message
        if isinstance(message, msg.RunStarted):
            launches.append(LaunchRecord(message))
        if isinstance(message, msg.TrajectoryEnd):
            launches[-1].ended.append(message.trajectory_id)
        for effect in buffer.decide(event.time, message):
            _note(launches[-1], effect.message)
    return launches


def _note(launch_record: LaunchRecord, effect: msg.AnyMessage) -> None:
    launch_record.batches += launch_record.groups.add(effect)
    match effect:
        case msg.StartGroup(purpose="train"):
            launch_record.started.append(effect)
        case msg.StepCollected():
            if effect.step not in launch_record.ends_before:  # the batch is sent to two receivers
                launch_record.collected.append(effect)
                launch_record.ends_before[effect.step] = len(launch_record.ended)
        case _:
            pass


def has_started_work_for(folder: RunFolder, step: int) -> bool:
    """Return whether both logs have a trajectory that started after the request of `step`."""
    if not metrics(folder, "step"):
        return False
    requested = False
    for event, _ in read_events(folder.events / "head.sqlite", kinds=["StepRequested", "LeaseRequested"]):
        message = decode(event.frame).message
        requested = requested or (isinstance(message, msg.StepRequested) and message.step == step)
        if requested and isinstance(message, msg.LeaseRequested) and message.lease == 1:
            events = read_events(folder.events / "rollout-0.sqlite", trajectory=message.trajectory_id)
            return any(True for _ in events)
    return False


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory, start: Start, finished: RunFolder) -> Killed:
    """Kill the run while the learner trains the second step and rollouts work for the third.

    The kill also waits for the save of the first step, because the learner publishes weights before it saves them.
    """
    runs = tmp_path_factory.mktemp("killed")
    arguments = (*SETTINGS, *from_cold_start_of(finished))
    run = start(runs, *arguments)
    run.wait_until(lambda: has_started_work_for(run.folder, step=3))
    run.wait_until(lambda: 1 in list_saved_steps(run.folder.checkpoints))
    run.kill()
    start(runs, *arguments, "--resume").succeed()
    return Killed(run.folder, *read_launches(run.folder))


def test_the_run_resumes_after_the_last_step_with_checkpoint_and_log_record(killed: Killed) -> None:
    collected = {each.step: each.cursor for each in killed.first.collected}
    assert killed.step in (1, 2)
    assert killed.second.began.cursor == collected[killed.step]
    assert STEPS in list_saved_steps(killed.folder.checkpoints)


def test_each_step_is_trained_once_and_no_trajectory_twice(killed: Killed) -> None:
    assert [batch.step for batch in killed.trained] == list(range(1, STEPS + 1))
    rows = [row for batch in killed.trained for row in batch.samples]
    assert len(rows) == len({row.trajectory_id for row in rows}) > 0
    groups = {
        group.group_id: group for launch_record in (killed.first, killed.second) for group in launch_record.started
    }
    by_step = [{groups[row.group_id].seed for row in batch.samples} for batch in killed.trained]
    assert max(Counter(chain.from_iterable(by_step)).values()) == 1  # no problem is trained twice either


def test_only_the_groups_in_flight_are_restarted_before_new_ones(killed: Killed) -> None:
    """A group's seed depends on its problem's position in the sequence."""
    cursor = killed.second.began.cursor
    before, after = killed.first.started, killed.second.started
    assert cursor.pending or killed.step > 1  # the second step was in progress when the first was collected
    restarted = [before[position] for position in cursor.pending]
    restarts = after[: len(restarted)]
    assert [(group.problem, group.seed) for group in restarts] == [(group.problem, group.seed) for group in restarted]
    assert [group.group_id for group in after[:1]] == [cursor.next_group_id]
    assert min(group.first_trajectory_id for group in after) == cursor.next_trajectory_id
    done = {group.seed for place, group in enumerate(before[: cursor.position]) if place not in cursor.pending}
    assert done.isdisjoint(group.seed for group in after)
    seeds = [*done, *(group.seed for group in after)]
    assert len(seeds) == len(set(seeds))


def test_every_group_that_is_not_restarted_had_ended(killed: Killed) -> None:
    """All trajectories of such a group had ended when the resumed step was collected."""
    cursor = killed.second.began.cursor
    ended = killed.first.list_ended_by(killed.step)
    for place, group in enumerate(killed.first.started[: cursor.position]):
        ids = range(group.first_trajectory_id, group.first_trajectory_id + group.size)
        assert place in cursor.pending or ended.issuperset(ids)


def test_training_samples_have_the_versions_that_their_step_allows(killed: Killed) -> None:
    """After the kill, no sample is older than the checkpoint: trajectories of the first launch are not used."""
    for batch in killed.trained:
        check_versions(batch.samples, batch.step, AHEAD)
    staleness: set[int] = set()
    for batch in killed.second.batches:
        for row in batch.samples:
            counted = np.frombuffer(row.record.loss_mask, np.uint8).astype(bool)
            versions = np.frombuffer(row.record.versions, np.int32)[counted]
            assert versions.min() >= killed.step
            staleness |= set((batch.step - 1 - versions).tolist())
    assert staleness == {0, 1}


def test_each_step_has_one_metrics_line_with_the_counts_of_its_batch(killed: Killed) -> None:
    steps = metrics(killed.folder, "step")
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    for line, batch in zip(steps, killed.trained, strict=True):
        counted = [np.frombuffer(row.record.loss_mask, np.uint8).astype(bool) for row in batch.samples]
        versions = [
            np.frombuffer(row.record.versions, np.int32)[mask] for row, mask in zip(batch.samples, counted, strict=True)
        ]
        staleness = batch.step - 1 - np.concatenate(versions) if versions else np.zeros(1)
        assert line["rows"] == len(batch.samples)
        assert line["staleness_max"] == staleness.max()
        assert line["staleness_mean"] == pytest.approx(staleness.mean())


def test_the_counts_add_up_and_both_launches_replay(killed: Killed) -> None:
    summary = json.loads(killed.folder.summary.read_text())
    assert is_conserved(summary, "aborted")
    assert summary["trajectories_abandoned"] > 0
    assert summary["steps"] == STEPS
    assert summary["replay_identical"] is True

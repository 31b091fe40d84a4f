"""Reading the groups of each step from a head's log, for simulated runs with known batches."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

import pytest
from msgspec.structs import replace

from actors.cli.log.roc_command import refilter
from actors.replay.logged_groups import read_step_groups
from analysis.what_if.roc_refilter import rebuild_training_rows
from bus.addresses import HEAD
from bus.event_log.writer import EventLog
from configs.errors import UnusableInput
from configs.load import write_resolved
from configs.run_folder import RunFolder
from configs.schema import RocConfig
from tests.simulation.test_faults import live
from tests.simulation.world import World

# One seed per kind of step: synchronous, oversampled, and two with stale rollouts (tests.simulation.test_faults.RL).
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 4))]


def logged(world: World, path: Path, times: int = 1, process: str = HEAD) -> RunFolder:
    """A run folder with the simulated log of a process, repeated for `times` launches."""
    folder = RunFolder(path)
    log = EventLog(folder.events / f"{process}.sqlite")
    for _ in range(times):
        for event in world.logs[process].events:
            seq = log.append(event.time, event.actor, event.sender, event.kind, event.trajectory, event.frame)
            decision = world.logs[process].decisions[event.seq]
            log.append_decision(seq, decision.effects, decision.state)
    log.close()
    write_resolved(world.run, folder.config)
    return folder


@pytest.mark.parametrize("seed", SEEDS)
def test_every_step_has_the_batch_that_the_learner_received(seed: int, tmp_path: Path) -> None:
    world = live(seed)
    steps = list(read_step_groups(world.run, logged(world, tmp_path)))
    assert [step.batch for step in steps] == world.batches
    assert sum(len(batch.samples) for batch in world.batches) > 0


@pytest.mark.parametrize("seed", SEEDS)
def test_refiltering_a_steps_groups_with_the_runs_settings_gives_its_batch(seed: int, tmp_path: Path) -> None:
    world = live(seed)
    for step in read_step_groups(world.run, logged(world, tmp_path)):
        by_group = {group.group_id: rebuild_training_rows(group, world.run) for group in step.groups}
        assert tuple(row for group_id in sorted(by_group) for row in by_group[group_id]) == step.batch.samples


@pytest.mark.parametrize("seed", SEEDS)
def test_the_number_of_groups_matches_the_runs_metrics(seed: int, tmp_path: Path) -> None:
    world = live(seed)
    num_groups = {step.step: len(step.groups) for step in read_step_groups(world.run, logged(world, tmp_path))}
    assert num_groups == {line.step: line.values["groups"] for line in world.metrics if line.kind == "step"}


def test_the_later_of_two_launches_counts(tmp_path: Path) -> None:
    world = live(1)
    once = refilter(logged(world, tmp_path / "once"), world.run, None)
    twice = refilter(logged(world, tmp_path / "twice", times=2), world.run, None)
    assert once.steps == twice.steps
    assert [step.step for step in once.steps] == [batch.step for batch in world.batches]


def test_plain_grpo_keeps_more_trajectories_in_every_step(tmp_path: Path) -> None:
    world = live(1)
    folder = logged(world, tmp_path)
    plain = refilter(folder, replace(world.run, roc=RocConfig(enabled=False)), None)
    assert plain.settings == ("roc.enabled: true -> false",)
    for step in plain.steps:
        assert step.difference.other.trajectories > step.difference.run.trajectories == step.difference.both
    num_kept = sum(step.difference.run.trajectories for step in plain.steps)
    assert plain.all_steps.run.trajectories == num_kept == sum(len(batch.samples) for batch in world.batches)


def test_a_step_outside_the_run_is_refused_by_its_number(tmp_path: Path) -> None:
    world = live(1)
    with pytest.raises(UnusableInput, match=r"--step 9: .* has steps 1 to 2"):
        refilter(logged(world, tmp_path), world.run, 9)


def test_batches_that_differ_from_the_runs_are_refused(tmp_path: Path) -> None:
    world = live(1)
    folder = logged(world, tmp_path)
    other = replace(world.run, seed=world.run.seed + 1)
    with pytest.raises(UnusableInput, match="differs from the recomputed one"):
        list(read_step_groups(other, folder))
    with contextlib.closing(sqlite3.connect(folder.events / "head.sqlite")) as log, log:
        log.execute("DELETE FROM events WHERE kind = 'StepRequested'")
    with pytest.raises(UnusableInput, match="no step has all of its events"):
        refilter(folder, world.run, None)


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_step_with_missing_events_is_left_out_and_later_steps_are_kept(share: float, tmp_path: Path) -> None:
    world = live(0)
    folder = logged(world, tmp_path)
    with contextlib.closing(sqlite3.connect(folder.events / "head.sqlite")) as log, log:
        (second,) = log.execute("SELECT max(seq) FROM events WHERE kind = 'StepRequested'").fetchone()
        log.execute(
            "DELETE FROM events WHERE seq < ? AND kind NOT IN ('RunStarted', 'StepRequested', 'StepCollected')",
            ((1 - share) * second,),
        )
    (step,) = read_step_groups(world.run, folder)
    assert step.batch == world.batches[-1]
    assert sum(len(group.rows) for group in step.groups) == len(step.batch.samples)


def test_a_run_without_an_event_log_is_refused_with_the_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UnusableInput, match=r"head\.sqlite: there is no event log"):
        list(read_step_groups(live(1).run, RunFolder(tmp_path)))

"""The groups of each step, found in a head's log: those of simulated runs, whose batches are known."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

import pytest
from msgspec.structs import replace

from actors.logged_groups import steps_of
from actors.roc_command import refilter
from actors.wiring import HEAD
from bus.event_log import EventLog
from configs.errors import UnusableInput
from configs.load import write_resolved
from configs.run_folder import RunFolder
from configs.schema import Roc
from policies.refiltering import rows_by
from tests.simulation.test_faults import live
from tests.simulation.world import World

# Of every kind of step one: synchronous, with spare groups, and two that run ahead (tests.simulation.test_faults.RL).
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 4))]


def logged(world: World, path: Path, times: int = 1, process: str = HEAD) -> RunFolder:
    """The folder of a run that left the world's log of a process, so many lives of it."""
    folder = RunFolder(path)
    log = EventLog(folder.events / f"{process}.sqlite")
    for _ in range(times):
        for event in world.logs[process].events:
            seq = log.append(event.time, event.actor, event.sender, event.kind, event.trajectory, event.frame)
            decision = world.logs[process].decisions[event.seq]
            log.decided(seq, decision.effects, decision.state)
    log.close()
    write_resolved(world.run, folder.config)
    return folder


@pytest.mark.parametrize("seed", SEEDS)
def test_every_step_gets_the_rows_that_it_was_trained_on(seed: int, tmp_path: Path) -> None:
    world = live(seed)
    steps = list(steps_of(world.run, logged(world, tmp_path)))
    assert [step.batch for step in steps] == world.batches
    assert sum(len(batch.rows) for batch in world.batches) > 0


@pytest.mark.parametrize("seed", SEEDS)
def test_the_groups_of_a_step_filtered_by_the_runs_settings_are_its_rows(seed: int, tmp_path: Path) -> None:
    world = live(seed)
    for step in steps_of(world.run, logged(world, tmp_path)):
        by_group = {group.group_id: rows_by(group, world.run) for group in step.groups}
        assert tuple(row for group_id in sorted(by_group) for row in by_group[group_id]) == step.batch.rows


@pytest.mark.parametrize("seed", SEEDS)
def test_as_many_groups_are_found_as_the_run_counted(seed: int, tmp_path: Path) -> None:
    world = live(seed)
    found = {step.step: len(step.groups) for step in steps_of(world.run, logged(world, tmp_path))}
    assert found == {line.step: line.values["groups"] for line in world.metrics if line.kind == "step"}


def test_of_two_lives_the_later_one_counts(tmp_path: Path) -> None:
    world = live(1)
    once = refilter(logged(world, tmp_path / "once"), world.run, None)
    twice = refilter(logged(world, tmp_path / "twice", times=2), world.run, None)
    assert once.steps == twice.steps
    assert [step.step for step in once.steps] == [batch.step for batch in world.batches]


def test_plain_grpo_would_have_kept_more_of_every_step(tmp_path: Path) -> None:
    world = live(1)
    folder = logged(world, tmp_path)
    plain = refilter(folder, replace(world.run, roc=Roc(enabled=False)), None)
    assert plain.settings == ("roc.enabled: true -> false",)
    for step in plain.steps:
        assert step.difference.other.trajectories > step.difference.run.trajectories == step.difference.both
    kept = sum(step.difference.run.trajectories for step in plain.steps)
    assert plain.all_steps.run.trajectories == kept == sum(len(batch.rows) for batch in world.batches)


def test_a_step_that_the_run_has_not_is_refused_by_its_number(tmp_path: Path) -> None:
    world = live(1)
    with pytest.raises(UnusableInput, match=r"--step 9: .* has steps 1 to 2"):
        refilter(logged(world, tmp_path), world.run, 9)


def test_rows_that_are_not_those_of_the_run_are_found_out(tmp_path: Path) -> None:
    world = live(1)
    folder = logged(world, tmp_path)
    other = replace(world.run, seed=world.run.seed + 1)
    with pytest.raises(UnusableInput, match="are not those that are found now"):
        list(steps_of(other, folder))
    with contextlib.closing(sqlite3.connect(folder.events / "head.sqlite")) as log, log:
        log.execute("DELETE FROM events WHERE kind = 'StepRequested'")
    with pytest.raises(UnusableInput, match="of no step all events are there"):
        refilter(folder, world.run, None)


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_step_of_which_events_are_gone_is_left_out_and_later_ones_are_not(share: float, tmp_path: Path) -> None:
    world = live(0)
    folder = logged(world, tmp_path)
    with contextlib.closing(sqlite3.connect(folder.events / "head.sqlite")) as log, log:
        (second,) = log.execute("SELECT max(seq) FROM events WHERE kind = 'StepRequested'").fetchone()
        log.execute(
            "DELETE FROM events WHERE seq < ? AND kind NOT IN ('RunStarted', 'StepRequested', 'StepCollected')",
            ((1 - share) * second,),
        )
    (step,) = steps_of(world.run, folder)
    assert step.batch == world.batches[-1]
    assert sum(len(group.rows) for group in step.groups) == len(step.batch.rows)


def test_a_run_without_an_event_log_is_refused_by_the_name_of_the_file(tmp_path: Path) -> None:
    with pytest.raises(UnusableInput, match=r"head\.sqlite: there is no event log"):
        list(steps_of(live(1).run, RunFolder(tmp_path)))

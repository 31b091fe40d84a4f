"""The report on a whole run, simulated under a virtual clock, agrees with the run's event log."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import polars as pl
import pytest

from asterism.actors.runtime.decider_loop import Observer
from asterism.analysis.utilization.log_schema import LogTables, read_log_tables
from asterism.analysis.utilization.report import Utilization, compute_utilization
from asterism.bus.addresses import HEAD, ROLLOUT
from asterism.bus.codec import decode
from asterism.bus.messages import AnyMessage, ProtocolError, StepCounts, TrajectoryFailed, TrajectoryFinished
from asterism.configs.schema.schema_tree import replace_keys
from asterism.configs.schema.success import SuccessRule
from asterism.policies.decider import Decider, Send
from asterism.policies.groups.counts import add_trajectory
from asterism.policies.observers import StepObserver, TrajectoryObserver
from asterism.policies.rollout.rollout import Rollout
from asterism.policies.rollout.trajectory import PHASES
from tests.analysis.utilization.log_lines import Logs
from tests.fakes import start_group
from tests.simulation.invariants import select
from tests.simulation.small_run import SMALL
from tests.simulation.world import World

pytestmark = pytest.mark.slow

RUN = replace_keys(SMALL, {"rl.steps": 2})
SEED = 5  # seed of the simulated run


Recorded = tuple[World, "Phases", Utilization, LogTables]


class Phases:
    """An observer that writes the phase counts after each event and records the live trajectories."""

    def __init__(self, writer: EventWriter, rollout: Rollout) -> None:
        self.inner, self.rollout = TrajectoryObserver(writer, rollout), rollout
        self.quiet = False
        self.live: list[int] = []

    def on_decision(self, now: float, event: AnyMessage, effects: Sequence[Send]) -> None:
        self.inner.on_decision(now, event, effects)
        self.inner.write_counts()
        self.live.append(self.rollout.num_by_phase.total())


class EventWriter:
    """A writer of log lines with the time of the observed event."""

    def __init__(self, logs: Logs, process: str) -> None:
        self._logs, self._process, self.now = logs, process, 0.0

    def __call__(self, event: str, **fields: Any) -> None:
        self._logs.line(self._process, self.now, event, **fields)


def observe(
    world: World, process: str, deciders: Mapping[str, Decider], observer: Observer, writer: EventWriter
) -> None:
    """Replay all events of the process's log."""
    for event in world.logs[process].events:
        message = decode(event.frame).message
        writer.now = event.time
        with contextlib.suppress(ProtocolError):
            observer.on_decision(event.time, message, deciders[event.actor].decide(event.time, message))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorded]:
    world = World(RUN, SEED, failure_rate=0.1).play()
    logs = Logs(tmp_path_factory.mktemp("recorded") / "logs")
    writer, head_writer = EventWriter(logs, ROLLOUT), EventWriter(logs, HEAD)
    deciders = world.deciders()
    decider = deciders[ROLLOUT][ROLLOUT]
    assert isinstance(decider, Rollout)
    rollout = Phases(writer, decider)
    observe(world, ROLLOUT, deciders[ROLLOUT], rollout, writer)
    observe(world, HEAD, deciders[HEAD], StepObserver(head_writer), head_writer)
    yield world, rollout, compute_utilization(logs.folder), read_log_tables(logs.folder)


def ends(world: World) -> list[TrajectoryFinished | TrajectoryFailed]:
    return select(world.logs[HEAD].events, TrajectoryFinished, TrajectoryFailed)


def test_totals_agree_with_the_event_log(recorded: Recorded) -> None:
    """Finished trajectories are compared by their messages. The log has only the number of failed trajectories."""
    world, _, use, lines = recorded
    counts = StepCounts()
    for message in ends(world):
        if isinstance(message, TrajectoryFinished):
            counts = add_trajectory(counts, start_group(), message, SuccessRule())
    failed = [each for each in ends(world) if isinstance(each, TrajectoryFailed)]
    told, ended = use.trajectories, lines.frames["trajectory.ended"]
    lost = ended.filter(pl.col("ending") == "failed")
    assert told.started == told.ended == len(ends(world))
    assert told.failed == lost.height == len(failed) > 0
    assert sorted(lost["cause"]) == sorted(each.cause for each in failed)
    assert told.generated_tokens - lost["generated_tokens"].sum() == pytest.approx(counts.generated_tokens, rel=0.01)
    assert told.calls - lost["calls"].sum() == counts.totals.calls
    assert [step.name for step in use.steps] == [
        *("evaluation start_sampled", "evaluation start_greedy", "step 1", "step 2"),
        *("evaluation end_sampled", "evaluation end_greedy"),
    ]
    assert sum(step.trajectories for step in use.steps) == told.ended
    for name, wait in told.waits.items():
        assert wait.total_s - lost[name].sum() == pytest.approx(getattr(counts, name), rel=0.01)


def test_every_live_trajectory_is_in_exactly_one_phase(recorded: Recorded) -> None:
    _, rollout, use, _ = recorded
    assert max(rollout.live) == RUN.rl.prompts * RUN.rl.rollouts
    assert rollout.live[-1] == 0
    assert not any(rollout.rollout.num_generating.values())
    assert use.timeline.trajectories["leasing"][-1] < 1  # the last interval of the timeline is a mean


def test_time_in_phases_equals_the_waits_of_trajectories(recorded: Recorded) -> None:
    _, _, use, _ = recorded
    names = dict(zip(PHASES, use.trajectories.waits, strict=True))
    for phase, wait in names.items():
        counted_s = sum(use.timeline.trajectories[phase]) * use.timeline.bin_s
        assert counted_s == pytest.approx(use.trajectories.waits[wait].total_s, rel=0.01, abs=0.05)

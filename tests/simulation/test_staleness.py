"""Whole runs in which rollouts are ahead of the learner, or in which a step ends with its first complete groups."""

import asyncio
from functools import cache

import numpy as np
import pytest
from msgspec.structs import replace

from asterism.bus.addresses import HEAD, ROLLOUT
from asterism.bus.messages import AnyMessage, MetricsRecorded, StartGroup, StepCollected
from asterism.configs.schema.algorithm import RlConfig
from asterism.configs.schema.schema_tree import replace_keys
from tests.simulation.invariants import check, check_the_counts, launches, select
from tests.simulation.small_run import SMALL
from tests.simulation.world import World

pytestmark = pytest.mark.slow

RUN = replace_keys(SMALL, {"learner.checkpoints.every": 1, "rl.steps": 5})
SYNCHRONOUS = RUN.rl
ABORTING = replace(SYNCHRONOUS, group_oversampling=1.5)
AHEAD = replace(SYNCHRONOUS, max_staleness=1)
CARRYING = replace(ABORTING, max_staleness=1, surplus_groups="carry")


@cache
def live(step: RlConfig) -> World:
    world = World(replace(RUN, rl=step), seed=1, failure_rate=0.0).play()
    check(world)
    check_the_counts(world)
    return world


def lines(world: World, kind: str) -> list[dict[str, float]]:
    return [line.values for line in world.metrics if line.kind == kind]


def test_trained_samples_reach_but_never_exceed_the_staleness_bound() -> None:
    world, behind = live(AHEAD), set[int]()
    for batch in world.batches:
        for row in batch.samples:
            counted = np.frombuffer(row.record.loss_mask, np.uint8).astype(bool)
            behind |= set((batch.step - 1 - np.frombuffer(row.record.versions, np.int32)[counted]).tolist())
    assert behind == {0, 1}
    steps = lines(world, "step")
    assert max(values["staleness_max"] for values in steps) == 1.0
    assert all(0 <= values["staleness_mean"] <= values["staleness_max"] for values in steps)


def test_a_trajectory_continues_over_a_weight_change() -> None:
    seen = [set(np.frombuffer(row.record.versions, np.int32)) - {-1} for row in live(AHEAD).disk.rows()]
    assert any(len(versions) > 1 for versions in seen)


def test_a_run_ahead_of_the_learner_ends_earlier_than_a_synchronous_run() -> None:
    ended = [live(step).logs[HEAD].events[-1].time for step in (AHEAD, SYNCHRONOUS)]
    assert ended[0] < ended[1]


def test_the_times_of_overlapping_steps_add_up_to_the_run() -> None:
    world = live(AHEAD)
    first = next(event.time for event in world.logs[HEAD].events if event.kind == "StepRequested")
    synced = [each for each in world.logs[HEAD].events if (each.kind, each.actor) == ("WeightsSynced", "recorder")]
    summed_s = sum(values["step_s"] for values in lines(world, "step"))
    assert summed_s == pytest.approx(synced[-1].time - first, abs=0.2)  # messages to two actors have different delays


def test_a_step_that_ends_early_reports_its_length_bias() -> None:
    lengths = lines(live(ABORTING), "lengths")
    assert [line["started_trajectories"] >= line["taken_trajectories"] for line in lengths] == [True] * 5
    assert sum(line["aborted_trajectories"] for line in lengths) > 0
    for line in lengths:
        assert line["length_bias"] == line["taken_response_tokens"] / line["started_response_tokens"]


class KilledWorld(World):
    """A world that kills the launcher and all processes when the second step has metrics and a checkpoint."""

    async def store_metrics(self, message: AnyMessage) -> None:
        await super().store_metrics(message)
        if isinstance(message, MetricsRecorded) and (message.kind, message.step) == ("step", 2):
            self._kill_after_checkpoint()

    def _kill_after_checkpoint(self) -> None:
        if self.deaths["launcher"]:
            return
        loop = asyncio.get_running_loop()
        if 2 in self.disk.checkpoints:
            loop.call_soon(lambda: self.kill_all(with_launcher=True))
        else:
            loop.call_later(0.001, self._kill_after_checkpoint)


def test_a_resumed_run_keeps_the_groups_in_flight_for_later_steps() -> None:
    world = KilledWorld(replace(RUN, rl=CARRYING), seed=4, failure_rate=0.0).play()
    check(world)
    assert world.first_step == 2
    collected = select(world.logs[HEAD].events, StepCollected)
    cursor = next(each.cursor for each in collected if each.step == world.first_step)
    assert cursor.pending
    before, after = [
        [each for each in select(events, StartGroup) if each.purpose == "train"] for events in launches(world, ROLLOUT)
    ]
    asked = {group.seed: group.problem for group in before}
    again = after[: len(cursor.pending)]
    assert [asked[group.seed] for group in again] == [group.problem for group in again]
    assert min(group.group_id for group in again) == cursor.next_group_id

"""Whole runs with rollouts ahead of the learner: no lost trajectories, no stale samples."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from msgspec.structs import replace

from actors.runtime.decider_loop import compute_state_fingerprint
from bus.messages import RunFinished, StepCollected, TrajectoryAborted, TrajectoryFailed, TrajectoryFinished
from configs.schema import DialogueConfig, EvaluationConfig, RlConfig, RunConfig
from tests.simulation.running_ahead import RunningAhead, deciders_of
from tests.simulation.seeds import select_seeds

BASE = RunConfig(
    name="ahead",
    dialogue=DialogueConfig(prompt_tokens=16, response_tokens=400),
    rl=RlConfig(steps=5, prompts=4, rollouts=4, max_refill_groups=2),
    evaluation=EvaluationConfig(questions=3),
)
SYNCHRONOUS = BASE
ABORTING = replace(BASE, rl=replace(BASE.rl, group_oversampling=1.5))
AHEAD = replace(BASE, rl=replace(BASE.rl, max_staleness=1))
CARRYING = replace(BASE, rl=replace(BASE.rl, max_staleness=1, group_oversampling=1.5, surplus_groups="carry"))
DROPPING = replace(CARRYING, rl=replace(CARRYING.rl, max_staleness=2, stale_tokens="drop", group_oversampling=2.0))
AHEAD_ABORTING = replace(ABORTING, rl=replace(ABORTING.rl, max_staleness=2))
RUNS = {
    "synchronous": SYNCHRONOUS,
    "aborting": ABORTING,
    "ahead": AHEAD,
    "carrying": CARRYING,
    "dropping": DROPPING,
    "ahead_aborting": AHEAD_ABORTING,
}
NAMES = ["carrying", *(pytest.param(name, marks=pytest.mark.slow) for name in RUNS if name != "carrying")]
SEEDS = select_seeds(40, fast=(0,), per_change=2)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", NAMES)
def test_every_trajectory_that_starts_ends_once_and_the_steps_come_in_order(name: str, seed: int) -> None:
    """The simulated learner refuses samples older than the bound."""
    run = RUNS[name]
    world = RunningAhead(run, seed, trouble=0.1).live()
    assert world.finished == RunFinished(run.rl.steps)
    assert [batch.step for batch in world.batches] == [1, 2, 3, 4, 5]
    assert [line.step for line in world.lines if line.kind == "step"] == [1, 2, 3, 4, 5]
    started = {group.first_trajectory_id + place for group in world.started for place in range(group.size)}
    assert world.ends.keys() == started
    assert all(len(ends) == 1 for ends in world.ends.values())
    assert not world.turns and not world.sessions
    assert not world.deciders["rollout-0"].trajectories  # pyright: ignore
    assert not world.deciders["head/arbiter"].ledger.accounts  # pyright: ignore
    buffer = world.deciders["head/buffer"].state  # pyright: ignore
    assert not (buffer.steps or buffer.aborting or buffer.lengths)
    aborted = sum(isinstance(ends[0], TrajectoryAborted) for ends in world.ends.values())
    assert not aborted or run.rl.group_oversampling > 1
    _numbers_add_up(world)


def _numbers_add_up(world: RunningAhead) -> None:
    """Compare the counts in the metrics with the counts of trajectory ends."""
    of_training = {group.group_id for group in world.started if group.purpose == "train"}
    kinds = Counter(type(ends[0]) for ends in world.ends.values() if ends[0].group_id in of_training)  # pyright: ignore
    steps = [line.values for line in world.lines if line.kind == "step"]
    lengths = [line.values for line in world.lines if line.kind == "lengths"]
    late = sum(values["late_trajectories"] for values in lengths)
    counted = sum(values["trajectories"] + values["trajectories_failed"] for values in steps)
    assert counted + late == kinds[TrajectoryFinished] + kinds[TrajectoryFailed]
    assert sum(values["aborted_trajectories"] for values in lengths) == kinds[TrajectoryAborted]
    for values in steps:
        assert values["rollout_s"] + values["train_s"] + values["weights_s"] == pytest.approx(values["step_s"])


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_replay_of_the_log_gives_the_same_effects_and_states(name: str) -> None:
    world = RunningAhead(RUNS[name], 3, trouble=0.1).live()
    deciders = deciders_of(RUNS[name])
    for logged in world.log:
        decider = deciders[logged.actor]
        assert list(decider.decide(logged.at, logged.event)) == logged.effects
        assert compute_state_fingerprint(decider.get_state_after(logged.event)) == logged.state


@pytest.mark.slow
def test_trained_samples_reach_but_never_exceed_the_staleness_bound() -> None:
    world = RunningAhead(AHEAD, 1).live()
    behind: set[int] = set()
    for batch in world.batches:
        for row in batch.samples:
            counted = np.frombuffer(row.loss_mask, np.uint8).astype(bool)
            behind |= set((batch.step - 1 - np.frombuffer(row.versions, np.int32)[counted]).tolist())
    assert behind == {0, 1}
    steps = [line.values for line in world.lines if line.kind == "step"]
    assert max(values["staleness_max"] for values in steps) == 1.0
    assert all(0 <= values["staleness_mean"] <= values["staleness_max"] for values in steps)


@pytest.mark.slow
def test_a_trajectory_continues_over_a_weight_change() -> None:
    world = RunningAhead(AHEAD, 1).live()
    seen = [set(np.frombuffer(row.versions, np.int32)) - {-1} for batch in world.batches for row in batch.samples]
    assert any(len(versions) > 1 for versions in seen)


@pytest.mark.slow
def test_running_ahead_ends_earlier_than_waiting_for_the_learner() -> None:
    def duration(run: RunConfig) -> float:
        return max(logged.at for logged in RunningAhead(run, 2, training_s=8.0).live().log)

    assert duration(AHEAD) < duration(SYNCHRONOUS)


@pytest.mark.slow
def test_the_times_of_steps_that_overlap_add_up_to_the_run() -> None:
    world = RunningAhead(AHEAD, 2).live()
    first = next(logged.at for logged in world.log if type(logged.event).__name__ == "StepRequested")
    ended = [line.values["step_s"] for line in world.lines if line.kind == "step"]
    loaded = [logged for logged in world.log if type(logged.event).__name__ == "WeightsSynced"]
    last = max(logged.at for logged in loaded if logged.actor == "head/recorder")
    assert sum(ended) == pytest.approx(last - first, abs=0.2)  # delay of messages to two actors


@pytest.mark.slow
def test_a_step_that_ends_with_the_first_groups_reports_its_shorter_batch() -> None:
    lengths = [line.values for line in RunningAhead(ABORTING, 1).live().lines if line.kind == "lengths"]
    assert [line["started_trajectories"] >= line["taken_trajectories"] for line in lengths] == [True] * 5
    assert sum(line["aborted_trajectories"] for line in lengths) > 0
    for line in lengths:
        assert line["length_bias"] == line["taken_response_tokens"] / line["started_response_tokens"]


@pytest.mark.slow
def test_a_resumed_run_keeps_the_groups_in_flight_for_later_steps() -> None:
    """The resumed run has only the cursor of the last finished step, as after a kill."""
    before = RunningAhead(CARRYING, 4).live()
    collected = [logged.event for logged in before.log if logged.actor == "head/recipe"]
    (second,) = [event for event in collected if isinstance(event, StepCollected) and event.step == 2]
    assert second.cursor.pending
    after = RunningAhead(CARRYING, 5, step=2).live(second.cursor)
    assert [batch.step for batch in after.batches] == [3, 4, 5]
    asked = {group.seed: group.problem for group in before.started if group.purpose == "train"}
    again = [group for group in after.started if group.purpose == "train"][: len(second.cursor.pending)]
    assert [asked[group.seed] for group in again] == [group.problem for group in again]
    assert min(group.group_id for group in again) == second.cursor.next_group_id

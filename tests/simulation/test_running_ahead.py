"""Whole runs whose rollouts run ahead of the learner, seed after seed: nobody is lost, nothing too old is trained on."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from msgspec.structs import replace

from actors.decider_loop import state_fingerprint
from bus.messages import RunFinished, StepCollected, TrajectoryAborted, TrajectoryFailed, TrajectoryFinished
from configs.schema import Dialogue, Evaluation, Rl, Run
from tests.simulation.running_ahead import RunningAhead, deciders_of

BASE = Run(
    name="ahead",
    dialogue=Dialogue(prompt_tokens=16, response_tokens=400),
    rl=Rl(steps=5, prompts=4, rollouts=4, refills=2),
    evaluation=Evaluation(questions=3),
)
SYNCHRONOUS = BASE
ABORTING = replace(BASE, rl=replace(BASE.rl, oversubscribe=1.5))
AHEAD = replace(BASE, rl=replace(BASE.rl, max_staleness=1))
CARRYING = replace(BASE, rl=replace(BASE.rl, max_staleness=1, oversubscribe=1.5, leftovers="carry"))
DROPPING = replace(CARRYING, rl=replace(CARRYING.rl, max_staleness=2, too_old="drop", oversubscribe=2.0))
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
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 40))]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", NAMES)
def test_every_trajectory_that_starts_ends_once_and_the_steps_come_in_order(name: str, seed: int) -> None:
    """The learner of this world refuses what is older than the bound."""
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
    assert not world.deciders["head/arbiter"].ledger.holdings  # pyright: ignore
    buffer = world.deciders["head/buffer"].state  # pyright: ignore
    assert not (buffer.steps or buffer.stopping or buffer.lengths)
    aborted = sum(isinstance(ends[0], TrajectoryAborted) for ends in world.ends.values())
    assert not aborted or run.rl.oversubscribe > 1
    _numbers_add_up(world)


def _numbers_add_up(world: RunningAhead) -> None:
    """Steps, evaluations and what was stopped, against what was started."""
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
        assert state_fingerprint(decider.state_after(logged.event)) == logged.state


@pytest.mark.slow
def test_what_is_trained_on_is_never_older_than_the_bound_and_sometimes_that_old() -> None:
    world = RunningAhead(AHEAD, 1).live()
    behind: set[int] = set()
    for batch in world.batches:
        for row in batch.rows:
            counted = np.frombuffer(row.loss_mask, np.uint8).astype(bool)
            behind |= set((batch.step - 1 - np.frombuffer(row.versions, np.int32)[counted]).tolist())
    assert behind == {0, 1}
    steps = [line.values for line in world.lines if line.kind == "step"]
    assert max(values["staleness_max"] for values in steps) == 1.0
    assert all(0 <= values["staleness_mean"] <= values["staleness_max"] for values in steps)


@pytest.mark.slow
def test_a_trajectory_goes_on_over_a_weight_change() -> None:
    world = RunningAhead(AHEAD, 1).live()
    seen = [set(np.frombuffer(row.versions, np.int32)) - {-1} for batch in world.batches for row in batch.rows]
    assert any(len(versions) > 1 for versions in seen)


@pytest.mark.slow
def test_running_ahead_ends_earlier_than_waiting_for_the_learner() -> None:
    def duration(run: Run) -> float:
        return max(logged.at for logged in RunningAhead(run, 2, training_s=8.0).live().log)

    assert duration(AHEAD) < duration(SYNCHRONOUS)


@pytest.mark.slow
def test_the_times_of_steps_that_overlap_add_up_to_the_run() -> None:
    world = RunningAhead(AHEAD, 2).live()
    first = next(logged.at for logged in world.log if type(logged.event).__name__ == "StepRequested")
    ended = [line.values["step_s"] for line in world.lines if line.kind == "step"]
    loaded = [logged for logged in world.log if type(logged.event).__name__ == "WeightsHeld"]
    last = max(logged.at for logged in loaded if logged.actor == "head/recorder")
    assert sum(ended) == pytest.approx(last - first, abs=0.2)  # a request is on its way to two actors


@pytest.mark.slow
def test_ending_with_the_first_complete_groups_shortens_what_is_taken_and_says_so() -> None:
    lengths = [line.values for line in RunningAhead(ABORTING, 1).live().lines if line.kind == "lengths"]
    assert [line["started_trajectories"] >= line["taken_trajectories"] for line in lengths] == [True] * 5
    assert sum(line["aborted_trajectories"] for line in lengths) > 0
    for line in lengths:
        assert line["length_bias"] == line["taken_response_tokens"] / line["started_response_tokens"]


@pytest.mark.slow
def test_a_run_goes_on_with_the_groups_that_were_under_way_for_later_steps() -> None:
    """As after a kill: nothing but the cursor of the last step that was done is left."""
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

"""Groups come in whole, are judged once, and nothing is lost on the way."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from bus.messages import (
    BatchReady,
    BufferCursor,
    EvaluationFinished,
    EvaluationRequested,
    ProtocolError,
    RunStarted,
    StartGroup,
    StepCollected,
    StepRequested,
    TrajectoryFailed,
)
from configs.schema import Rl, Roc, Run
from policies.decider import Send
from policies.group_buffer import GroupBuffer, Problem
from tests.policies.groups import finished

RUN = Run(name="test", seed=3, rl=Rl(prompts=2, rollouts=4, refills=1))
TRAIN = [Problem(f"train:{number}", str(number), bytes(8)) for number in range(5)]
TEST = [Problem(f"test:{number}", str(number), bytes(8)) for number in range(3)]


def buffer(run: Run = RUN) -> GroupBuffer:
    return GroupBuffer(run, TRAIN, TEST)


def starts(effects: list[Send]) -> list[StartGroup]:
    return [effect.message for effect in effects if isinstance(effect.message, StartGroup)]


def play(group_buffer: GroupBuffer, group: StartGroup, rewards: list[float | None]) -> list[Send]:
    """All trajectories of a group; None is one that infrastructure lost."""
    effects: list[Send] = []
    for place, reward in enumerate(rewards):
        tid = group.first_trajectory_id + place
        event = (
            TrajectoryFailed(tid, group.group_id, "sandbox: gone")
            if reward is None
            else finished(tid, reward, group_id=group.group_id)
        )
        effects += group_buffer.decide(0.0, event)
    return effects


def batch_of(effects: list[Send]) -> BatchReady:
    (batch,) = [effect.message for effect in effects if isinstance(effect.message, BatchReady)]
    return batch


def collected(effects: list[Send]) -> StepCollected:
    return next(effect.message for effect in effects if isinstance(effect.message, StepCollected))


def test_a_step_starts_as_many_groups_as_it_trains_on_each_of_2g_trajectories() -> None:
    groups = starts(list(buffer().decide(0.0, StepRequested(1, 0))))
    assert [group.size for group in groups] == [4, 4]
    assert [group.first_trajectory_id for group in groups] == [0, 4]
    assert groups[0].seed != groups[1].seed


def test_mixed_groups_go_to_the_learner_resampled_with_their_advantages() -> None:
    group_buffer = buffer()
    first, second = starts(list(group_buffer.decide(0.0, StepRequested(1, 0))))
    play(group_buffer, first, [1.0, 0.0, 0.0, 1.0])
    effects = play(group_buffer, second, [0.0, 1.0, 0.0, 0.0])
    rows = batch_of(effects).rows
    assert [row.group_id for row in rows] == [0, 0, 1, 1]
    assert [row.advantage for row in rows] == pytest.approx([2**-0.5, -(2**-0.5)] * 2, abs=1e-5) or sorted(
        row.advantage for row in rows
    ) == pytest.approx([-(2**-0.5)] * 2 + [2**-0.5] * 2, abs=1e-5)
    assert collected(effects).counts.groups == 2


def test_plain_grpo_trains_on_the_whole_group() -> None:
    group_buffer = buffer(replace(RUN, roc=Roc(enabled=False)))
    first, second = starts(list(group_buffer.decide(0.0, StepRequested(1, 0))))
    play(group_buffer, first, [1.0, 0.0, 0.0, 1.0])
    assert len(batch_of(play(group_buffer, second, [0.0, 1.0, 0.0, 0.0])).rows) == 8


def test_equal_rewards_are_rejected_and_refilled_up_to_the_limit() -> None:
    group_buffer = buffer()
    first, second = starts(list(group_buffer.decide(0.0, StepRequested(1, 0))))
    (third,) = starts(play(group_buffer, first, [1.0] * 4))
    assert third.problem not in {first.problem, second.problem}
    assert not starts(play(group_buffer, second, [0.0] * 4))  # the one refill is used up
    effects = play(group_buffer, third, [1.0, 0.0, 1.0, 0.0])
    assert {row.group_id for row in batch_of(effects).rows} == {2}
    assert collected(effects).counts.groups_rejected == 2


def test_a_step_whose_groups_were_all_rejected_still_ends() -> None:
    group_buffer = buffer(replace(RUN, rl=replace(RUN.rl, refills=0)))
    first, second = starts(list(group_buffer.decide(0.0, StepRequested(1, 0))))
    play(group_buffer, first, [1.0] * 4)
    assert batch_of(play(group_buffer, second, [0.0] * 4)).rows == ()


def test_infrastructure_failures_are_set_apart_and_counted_by_cause() -> None:
    group_buffer = buffer()
    first, second = starts(list(group_buffer.decide(0.0, StepRequested(1, 0))))
    play(group_buffer, first, [1.0, None, 0.0, 1.0])
    step = collected(play(group_buffer, second, [0.0, 1.0, 0.0, 0.0]))
    assert step.counts.trajectories == 7
    assert step.counts.trajectories_failed == 1
    assert step.counts.correct == 3
    assert step.failures == {"sandbox": 1}


def test_a_group_that_loses_too_many_is_lost_and_replaced_not_taken_for_wrong() -> None:
    group_buffer = buffer()
    first, second = starts(list(group_buffer.decide(0.0, StepRequested(1, 0))))
    (third,) = starts(play(group_buffer, first, [None, None, None, 0.0]))
    play(group_buffer, third, [1.0, 0.0, 1.0, 0.0])
    step = collected(play(group_buffer, second, [0.0, 1.0, 0.0, 0.0]))
    assert step.counts.groups_lost == 1
    assert step.counts.groups_rejected == 0


def test_the_batch_does_not_depend_on_who_was_faster() -> None:
    def batch(order: list[int]) -> BatchReady:
        group_buffer = buffer()
        groups = starts(list(group_buffer.decide(0.0, StepRequested(1, 0))))
        events = [
            finished(group.first_trajectory_id + place, float(place % 2), group_id=group.group_id)
            for group in groups
            for place in range(4)
        ]
        effects: list[Send] = []
        for index in order:
            effects += group_buffer.decide(0.0, events[index])
        return batch_of(effects)

    assert batch([0, 1, 2, 3, 4, 5, 6, 7]) == batch([7, 2, 5, 0, 6, 1, 3, 4])


def test_a_trajectory_that_ends_twice_is_refused() -> None:
    group_buffer = buffer()
    group_buffer.decide(0.0, StepRequested(1, 0))
    group_buffer.decide(0.0, finished(0, 1.0))
    for again in (finished(0, 1.0), TrajectoryFailed(0, 0, "late")):
        with pytest.raises(ProtocolError, match="ended twice"):
            group_buffer.decide(0.0, again)


def test_a_step_is_not_begun_before_the_last_one_ended() -> None:
    group_buffer = buffer()
    group_buffer.decide(0.0, StepRequested(1, 0))
    with pytest.raises(ProtocolError):
        group_buffer.decide(0.0, StepRequested(2, 1))


def test_a_resumed_buffer_goes_on_where_the_step_ended() -> None:
    whole = buffer()
    groups = starts(list(whole.decide(0.0, StepRequested(1, 0))))
    effects = [effect for group in groups for effect in play(whole, group, [1.0, 0.0, 1.0, 0.0])]
    resumed = buffer()
    resumed.decide(0.0, RunStarted(1, collected(effects).cursor))
    assert resumed.decide(9.0, StepRequested(2, 1)) == whole.decide(5.0, StepRequested(2, 1))


def test_an_evaluation_asks_each_question_once_and_sets_failures_apart() -> None:
    group_buffer = buffer()
    request = EvaluationRequested("start_greedy", 0.0, 2, 0)
    groups = starts(list(group_buffer.decide(0.0, request)))
    assert [group.problem for group in groups] == ["test:0", "test:1"]
    assert {group.purpose for group in groups} == {"evaluate"}
    play(group_buffer, groups[0], [1.0])
    effects = play(group_buffer, groups[1], [None])
    answer = effects[0].message
    assert isinstance(answer, EvaluationFinished)
    assert (answer.questions, answer.correct, answer.failed) == (2, 1, 1)


def test_an_evaluation_uses_no_training_problem() -> None:
    group_buffer = buffer()
    before = group_buffer.state.cursor.position
    group_buffer.decide(0.0, EvaluationRequested("start_greedy", 0.0, 3, 0))
    assert group_buffer.state.cursor.position == before


@given(st.data())
def test_every_step_ends_and_its_numbers_add_up(data: st.DataObject) -> None:
    run = replace(RUN, rl=Rl(prompts=3, rollouts=4, refills=data.draw(st.integers(0, 3))))
    group_buffer = buffer(run)
    group_buffer.decide(0.0, RunStarted(0, BufferCursor()))
    pending = [
        (group, place)
        for group in starts(list(group_buffer.decide(0.0, StepRequested(1, 0))))
        for place in range(group.size)
    ]
    started, effects = len(pending), list[Send]()
    while pending:
        group, place = pending.pop(data.draw(st.integers(0, len(pending) - 1)))
        tid, outcome = group.first_trajectory_id + place, data.draw(st.sampled_from([0.0, 1.0, None]))
        event = (
            TrajectoryFailed(tid, group.group_id, "x")
            if outcome is None
            else finished(tid, outcome, group_id=group.group_id)
        )
        effects = list(group_buffer.decide(0.0, event))
        for refill in starts(effects):
            started += refill.size
            pending += [(refill, place) for place in range(refill.size)]
    counts, rows = collected(effects).counts, batch_of(effects).rows
    assert counts.trajectories + counts.trajectories_failed == started
    assert counts.groups * 4 == started
    accepted = counts.groups - counts.groups_rejected - counts.groups_lost
    assert len({row.group_id for row in rows}) == accepted <= 3
    assert len(rows) == 2 * accepted
    assert not group_buffer.state.steps


REWARDS = st.sampled_from([0.0, 1.0])


@given(
    st.lists(st.tuples(REWARDS, REWARDS, REWARDS, REWARDS), min_size=6, max_size=6),
    st.lists(st.integers(0, 2**16), min_size=24, max_size=24),
)
def test_a_batch_does_not_depend_on_the_order_in_which_trajectories_end(
    rewards: list[tuple[float, ...]], picks: list[int]
) -> None:
    """The sixth problem at most is reached: two groups and four refills."""
    run = replace(RUN, rl=Rl(prompts=2, rollouts=4, refills=4))
    in_turn, drawn = (_collected_in_order(buffer(run), rewards, order) for order in ([0] * 24, picks))
    assert drawn == in_turn


def _collected_in_order(
    group_buffer: GroupBuffer, rewards: list[tuple[float, ...]], picks: list[int]
) -> tuple[list[StartGroup], BatchReady, StepCollected]:
    """Of those under way, the next to end is the one that is picked. A group's place in its sequence decides rewards."""
    started: list[StartGroup] = []
    living: list[tuple[int, int, float]] = []  # trajectory, group, reward
    effects = list(group_buffer.decide(0.0, StepRequested(1, 0)))
    for pick in [None, *picks]:
        if pick is not None and living:
            tid, group_id, reward = living.pop(pick % len(living))
            effects = list(group_buffer.decide(0.0, finished(tid, reward, group_id=group_id)))
        for group in starts(effects):
            started.append(group)
            ids = range(group.first_trajectory_id, group.first_trajectory_id + group.size)
            living += [(tid, group.group_id, reward) for tid, reward in zip(ids, rewards[group.group_id], strict=True)]
        if any(isinstance(effect.message, BatchReady) for effect in effects):
            assert not living
            return started, batch_of(effects), collected(effects)
        effects = []
    raise AssertionError("the step never ended")

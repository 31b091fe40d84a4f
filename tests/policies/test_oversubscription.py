"""A step starts more groups than it needs; what is left over goes on or is stopped; then the run is over."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from bus.messages import (
    GroupAborted,
    LengthsMeasured,
    ProtocolError,
    RunFinished,
    StalenessCounts,
    TrajectoryAborted,
)
from configs.schema import Rl
from policies.collection import STEP_ENDED
from tests.policies.buffers import Play, batches, collected, of_versions, run_of, starts, stops


def test_a_step_starts_more_groups_than_it_needs_and_ends_with_the_first_complete_ones() -> None:
    play = Play(run_of(max_staleness=0, oversubscribe=1.5))
    assert len(starts(play.ask(1))) == 3
    play.end(2, 0)
    effects = play.end(0, 0)
    assert {row.group_id for row in batches(effects)[0].rows} == {0, 2}
    assert stops(effects) == [GroupAborted(1, 2, 2, STEP_ENDED)]
    assert [send.to for send in effects if isinstance(send.message, GroupAborted)] == ["rollout-0"]


def test_the_number_of_groups_is_rounded_up_and_not_by_a_rounding_error() -> None:
    assert Rl(prompts=10, oversubscribe=1.1).groups == 11
    assert Rl(prompts=10, oversubscribe=1.11).groups == 12
    assert Rl(prompts=512).groups == 512


def test_what_is_stopped_is_neither_an_answer_nor_a_failure() -> None:
    play = Play(run_of(max_staleness=0, oversubscribe=1.5))
    play.ask(1)
    play.end(0, 0)
    step = collected(play.end(1, 0))
    assert (step.counts.trajectories, step.counts.trajectories_failed, step.failures) == (4, 0, {})
    assert not play.hear(TrajectoryAborted(4, 2, STEP_ENDED, 7))
    (send,) = play.hear(TrajectoryAborted(5, 2, STEP_ENDED, 0))
    assert isinstance(send.message, LengthsMeasured)
    assert send.message.aborted == 2


def test_lengths_are_those_of_all_that_was_started_what_was_stopped_by_its_tokens_so_far() -> None:
    play = Play(run_of(max_staleness=0, oversubscribe=1.5))
    play.ask(1)
    play.end(0, 0, 0)
    play.end(1, 0)
    play.hear(replace(of_versions(4, 0, 0, 0, group_id=2), ending="length"))  # it crossed the word that it is to stop
    (send,) = play.hear(TrajectoryAborted(5, 2, STEP_ENDED, 7))
    measured = send.message
    assert isinstance(measured, LengthsMeasured)
    assert (measured.taken.trajectories, measured.taken.response_tokens, measured.taken.overlong) == (4, 6, 0)
    assert (measured.started.trajectories, measured.started.response_tokens, measured.started.overlong) == (6, 16, 1)
    assert (measured.aborted, measured.late) == (1, 1)


def test_a_trajectory_that_was_stopped_ends_once() -> None:
    play = Play(run_of(max_staleness=0, oversubscribe=1.5))
    play.ask(1)
    play.end(0, 0)
    play.end(1, 0)
    play.hear(TrajectoryAborted(4, 2, STEP_ENDED, 7))
    for again in (TrajectoryAborted(4, 2, STEP_ENDED, 7), of_versions(4, 0, group_id=2)):
        with pytest.raises(ProtocolError, match="ended twice"):
            play.hear(again)


def test_a_run_is_over_when_the_last_trajectory_that_is_stopped_has_ended() -> None:
    play = Play(run_of(max_staleness=0, oversubscribe=1.5))
    play.ask(1)
    play.end(0, 0)
    play.end(1, 0)
    assert not play.hear(RunFinished(1))
    assert not play.hear(TrajectoryAborted(4, 2, STEP_ENDED, 7))
    *_, last = play.hear(TrajectoryAborted(5, 2, STEP_ENDED, 0))
    assert (last.to, last.message) == ("launcher", RunFinished(1))


def test_a_run_that_stops_nobody_is_over_at_once() -> None:
    (send,) = Play(run_of()).hear(RunFinished(1))
    assert (send.to, send.message) == ("launcher", RunFinished(1))


def test_nobody_stops_a_trajectory_that_is_waited_for() -> None:
    play = Play(run_of())
    play.ask(1)
    with pytest.raises(ProtocolError, match="nobody asked for it"):
        play.hear(TrajectoryAborted(0, 0, STEP_ENDED, 7))


def test_a_group_that_is_left_over_counts_for_the_next_step_which_starts_one_less() -> None:
    play = Play(run_of(oversubscribe=1.5, leftovers="carry"))
    assert len(starts(play.ask(1))) == 3
    assert len(starts(play.ask(2))) == 2  # the spare one is for both
    play.end(0, 0)
    assert not stops(play.end(1, 0))
    assert len(starts(play.ask(3, 1))) == 2
    play.end(2, 0)
    (batch,) = batches(play.end(4, 0))
    assert {row.group_id for row in batch.rows} == {2, 4}


def test_a_group_that_was_carried_is_masked_or_dropped_when_it_is_too_old() -> None:
    for rule, rows, staleness in (
        ("mask", 2, StalenessCounts(tokens=4, versions_behind=2, most_behind=1, tokens_masked=2)),
        ("drop", 0, StalenessCounts(trajectories_dropped=2)),
    ):
        play = Play(run_of(prompts=1, oversubscribe=2, leftovers="carry", too_old=rule))
        play.ask(1)
        play.ask(2)
        play.end(0, 0)
        play.end(2, 0)  # group 1, begun for step 1, is carried to the third
        play.ask(3, 1)
        effects = play.end(1, 0, 1, 2)
        if rule == "drop":
            assert not batches(effects)  # lost with its group: the step waits for its own
            assert play.buffer.state.steps[3].counts.groups_lost == 1
            assert play.buffer.state.steps[3].staleness == staleness
        else:
            assert len(batches(effects)[0].rows) == rows
            assert collected(effects).staleness == staleness


def test_a_run_that_goes_on_begins_what_was_carried_anew() -> None:
    play = Play(run_of(prompts=1, oversubscribe=2, leftovers="carry"))
    play.ask(1)
    play.ask(2)
    assert collected(play.end(0, 0)).cursor.pending == (1, 2)


def test_the_spare_groups_are_made_up_for_when_they_are_used_up_and_counted_once() -> None:
    play = Play(run_of(max_staleness=2, prompts=1, oversubscribe=2, leftovers="carry"))
    assert [len(starts(play.ask(step))) for step in (1, 2, 3)] == [2, 1, 1]
    play.end(0, 0, rewards=(1.0, 1.0))
    play.end(1, 0, rewards=(0.0, 0.0))  # rejected like the other: the first step leaves nothing
    assert len(starts(play.ask(4, 1))) == 2
    play.end(4, 1)  # the fourth step waits for the second, and has left group 5 to the fifth
    play.end(2, 0)
    assert len(starts(play.ask(5, 2))) == 1


def test_nothing_is_left_over_for_a_step_that_never_comes() -> None:
    play = Play(run_of(steps=1, oversubscribe=1.5, leftovers="carry"))
    play.ask(1)
    play.end(0, 0)
    assert stops(play.end(1, 0)) == [GroupAborted(2, 4, 2, STEP_ENDED)]


def test_what_was_left_over_and_ended_before_its_step_was_asked_for_is_judged_then() -> None:
    play = Play(run_of(prompts=1, oversubscribe=3, leftovers="carry"))
    play.ask(1)
    play.end(0, 0)
    assert not play.end(1, 0)
    effects = play.ask(2)
    assert {row.group_id for row in batches(effects)[0].rows} == {1}

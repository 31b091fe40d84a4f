"""Groups that were judged once, judged by other settings."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from configs.schema import Rl, Roc, Run
from policies.filtering import kept_of, rows_of
from policies.refiltering import JudgedGroup, considered, difference, rows_by
from tests.policies.groups import finished

RUN = Run(name="test", seed=3, rl=Rl(prompts=2, rollouts=8))
# Positives 0 to 4 call twice; the first two fail nowhere, the others at every call.
YOUNG = [
    *(finished(number, 1.0, calls=2, failed=0 if number < 2 else 2) for number in range(5)),
    *(finished(number, 0.0) for number in range(5, 8)),
]


def judged(seed: int = 5, run: Run = RUN) -> JudgedGroup:
    return JudgedGroup(1, 0, seed, YOUNG, rows_of(YOUNG, kept_of(run), run.roc, seed))


@pytest.mark.parametrize("seed", range(20))
def test_the_runs_own_settings_keep_what_it_kept(seed: int) -> None:
    assert rows_by(judged(seed), RUN) == judged(seed).rows
    same = difference(considered(judged(seed), RUN))
    assert (same.run, same.both, same.advantage_change_mean) == (same.other, 4, 0.0)


def test_plain_grpo_keeps_the_whole_group_and_moves_the_advantages() -> None:
    plain = replace(RUN, roc=Roc(enabled=False))
    told = considered(judged(), plain)
    assert [each.other_advantage is not None for each in told] == [True] * 8
    found = difference(told)
    assert (found.run.trajectories, found.other.trajectories, found.both) == (4, 8, 4)
    ours = {row.trajectory_id: row.advantage for row in judged().rows}
    theirs = {row.trajectory_id: row.advantage for row in rows_by(judged(), plain)}
    expected = [abs(theirs[tid] - ours.get(tid, 0.0)) for tid in range(8)]
    assert found.advantage_change_mean == pytest.approx(sum(expected) / 8)
    of_both = [abs(theirs[tid] - ours[tid]) for tid in ours]
    assert found.advantage_change_both_mean == pytest.approx(sum(of_both) / 4)


def test_lowest_keeps_the_positives_that_fail_least() -> None:
    lowest = replace(RUN, roc=Roc(positives="lowest"))
    found = difference(considered(judged(), lowest))
    assert (found.other.positives, found.other.failed_call_share) == (2, 0.0)


def test_a_group_that_was_lost_may_be_accepted_by_others() -> None:
    lost = judged()._replace(young=[YOUNG[0], YOUNG[1], YOUNG[7]], rows=())
    assert rows_by(lost, RUN) == []
    assert len(rows_by(lost, replace(RUN, roc=Roc(enabled=False)))) == 3


def test_where_nothing_is_kept_there_are_no_shares() -> None:
    equal = judged()._replace(young=YOUNG[:5], rows=())
    found = difference(considered(equal, RUN))
    assert (found.run.groups, found.other.groups, found.both) == (0, 0, 0)
    assert found.run.failed_call_share is found.run.response_tokens_mean is found.advantage_change_mean is None

"""Judging a run's groups with other settings."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from analysis.what_if.roc_refilter import JudgedGroup, compute_difference, list_candidates, rebuild_training_rows
from configs.schema import RlConfig, RocConfig, RunConfig
from policies.groups.selection import build_training_rows, compute_keep_count
from tests.policies.groups.finished import finished

RUN = RunConfig(name="test", seed=3, rl=RlConfig(prompts=2, rollouts=8))
# Positives 0 to 4 call twice: no call of the first two fails, every call of the others does.
YOUNG = [
    *(finished(number, 1.0, calls=2, failed=0 if number < 2 else 2) for number in range(5)),
    *(finished(number, 0.0) for number in range(5, 8)),
]


def judged(seed: int = 5, run: RunConfig = RUN) -> JudgedGroup:
    return JudgedGroup(1, 0, seed, YOUNG, build_training_rows(YOUNG, compute_keep_count(run), run.roc, seed))


@pytest.mark.parametrize("seed", range(20))
def test_the_runs_own_settings_keep_the_same_trajectories(seed: int) -> None:
    assert rebuild_training_rows(judged(seed), RUN) == judged(seed).rows
    same = compute_difference(list_candidates(judged(seed), RUN))
    assert (same.run, same.both, same.advantage_change_mean) == (same.other, 4, 0.0)


def test_plain_grpo_keeps_the_whole_group_and_moves_the_advantages() -> None:
    plain = replace(RUN, roc=RocConfig(enabled=False))
    candidates = list_candidates(judged(), plain)
    assert [each.other_advantage is not None for each in candidates] == [True] * 8
    found = compute_difference(candidates)
    assert (found.run.trajectories, found.other.trajectories, found.both) == (4, 8, 4)
    ours = {row.trajectory_id: row.advantage for row in judged().rows}
    theirs = {row.trajectory_id: row.advantage for row in rebuild_training_rows(judged(), plain)}
    expected = [abs(theirs[tid] - ours.get(tid, 0.0)) for tid in range(8)]
    assert found.advantage_change_mean == pytest.approx(sum(expected) / 8)
    of_both = [abs(theirs[tid] - ours[tid]) for tid in ours]
    assert found.advantage_change_both_mean == pytest.approx(sum(of_both) / 4)


def test_lowest_keeps_the_positives_that_fail_least() -> None:
    lowest = replace(RUN, roc=RocConfig(positives="lowest"))
    found = compute_difference(list_candidates(judged(), lowest))
    assert (found.other.positives, found.other.failed_call_share) == (2, 0.0)


def test_other_settings_may_accept_a_rejected_group() -> None:
    lost = judged()._replace(fresh=[YOUNG[0], YOUNG[1], YOUNG[7]], rows=())
    assert rebuild_training_rows(lost, RUN) == []
    assert len(rebuild_training_rows(lost, replace(RUN, roc=RocConfig(enabled=False)))) == 3


def test_without_kept_trajectories_there_are_no_shares() -> None:
    equal = judged()._replace(fresh=YOUNG[:5], rows=())
    found = compute_difference(list_candidates(equal, RUN))
    assert (found.run.groups, found.other.groups, found.both) == (0, 0, 0)
    assert found.run.failed_call_share is found.run.response_tokens_mean is found.advantage_change_mean is None

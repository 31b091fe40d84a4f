"""Judges a run's groups with other Resample-on-Correct settings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from bus.messages import TrainingSample, TrajectoryFinished
from configs.schema import RunConfig
from policies.groups.selection import build_training_rows, compute_keep_count, judge_group


class JudgedGroup(NamedTuple):
    """A complete group as the buffer judged it."""

    step: int
    group_id: int
    seed: int
    fresh: Sequence[TrajectoryFinished]  # candidates: not too stale to train on
    rows: Sequence[TrainingSample]  # trained on; empty for a group that was not accepted


class CandidateTrajectory(msgspec.Struct, frozen=True):
    """One trajectory. An advantage is relative to the kept trajectories; None: not kept."""

    group_id: int
    trajectory_id: int
    reward: float
    calls: int
    calls_failed: int
    response_tokens: int
    advantage: float | None  # in the run
    other_advantage: float | None


class SelectionStats(msgspec.Struct, frozen=True):
    """Statistics of the trajectories that one setting keeps."""

    groups: int
    trajectories: int
    positives: int
    failed_call_share: float | None  # of the positives' calls; None: no calls
    response_tokens_mean: float | None


class SelectionDifference(msgspec.Struct, frozen=True):
    run: SelectionStats
    other: SelectionStats
    both: int  # trajectories that both settings keep
    # Mean absolute change over the trajectories that either keeps; 0 if not kept.
    advantage_change_mean: float | None
    advantage_change_both_mean: float | None  # over the trajectories that both keep


def rebuild_training_rows(group: JudgedGroup, run: RunConfig) -> list[TrainingSample]:
    """The rows that the step would train on with the settings of `run`."""
    keep_count = compute_keep_count(run)
    if judge_group(group.fresh, keep_count) != "accepted":
        return []
    return build_training_rows(group.fresh, keep_count, run.roc, group.seed)


def list_candidates(group: JudgedGroup, other: RunConfig) -> list[CandidateTrajectory]:
    """All trajectories that the step could train on, in the order of their ids."""
    ours = {row.trajectory_id: row.advantage for row in group.rows}
    theirs = {row.trajectory_id: row.advantage for row in rebuild_training_rows(group, other)}
    return [
        CandidateTrajectory(
            group_id=group.group_id,
            trajectory_id=each.trajectory_id,
            reward=each.reward,
            calls=each.calls,
            calls_failed=each.calls_failed,
            response_tokens=len(each.loss_mask) - each.prompt_tokens,
            advantage=ours.get(each.trajectory_id),
            other_advantage=theirs.get(each.trajectory_id),
        )
        for each in group.fresh
    ]


def compute_difference(trajectories: Sequence[CandidateTrajectory]) -> SelectionDifference:
    run = [each for each in trajectories if each.advantage is not None]
    other = [each for each in trajectories if each.other_advantage is not None]
    both = [each for each in run if each.other_advantage is not None]
    either = [each for each in trajectories if each.advantage is not None or each.other_advantage is not None]
    return SelectionDifference(
        run=_compute_stats(run),
        other=_compute_stats(other),
        both=len(both),
        advantage_change_mean=_compute_mean(_compute_advantage_change(each) for each in either),
        advantage_change_both_mean=_compute_mean(_compute_advantage_change(each) for each in both),
    )


def _compute_advantage_change(trajectory: CandidateTrajectory) -> float:
    return abs((trajectory.other_advantage or 0.0) - (trajectory.advantage or 0.0))


def _compute_stats(trajectories: Sequence[CandidateTrajectory]) -> SelectionStats:
    positives = [each for each in trajectories if each.reward > 0]
    calls = sum(each.calls for each in positives)
    return SelectionStats(
        groups=len({each.group_id for each in trajectories}),
        trajectories=len(trajectories),
        positives=len(positives),
        failed_call_share=sum(each.calls_failed for each in positives) / calls if calls else None,
        response_tokens_mean=_compute_mean(each.response_tokens for each in trajectories),
    )


def _compute_mean(values: Iterable[float]) -> float | None:
    listed = list(values)
    return sum(listed) / len(listed) if listed else None

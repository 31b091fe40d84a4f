"""A group that a run has judged, judged by other settings of Resample-on-Correct: who is kept, with what advantage."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from bus.messages import Row, TrajectoryFinished
from configs.schema import Run
from policies.filtering import kept_of, rows_of, verdict_on


class JudgedGroup(NamedTuple):
    """A complete group as the buffer judged it."""

    step: int  # that it counted for
    group_id: int
    seed: int
    young: Sequence[TrajectoryFinished]  # that the step may train on
    rows: Sequence[Row]  # that it trained on; none of a group that was not accepted


class Considered(msgspec.Struct, frozen=True):
    """One trajectory. Advantages are those in the group of the kept; None: it is not kept."""

    group_id: int
    trajectory_id: int
    reward: float
    calls: int
    calls_failed: int
    response_tokens: int
    advantage: float | None  # in the run
    other_advantage: float | None


class Kept(msgspec.Struct, frozen=True):
    """Of the trajectories that are kept under the same settings."""

    groups: int
    trajectories: int
    positives: int
    failed_call_share: float | None  # of the positives' calls; None: they made none
    response_tokens_mean: float | None


class Difference(msgspec.Struct, frozen=True):
    run: Kept
    other: Kept
    both: int  # trajectories that are kept under both
    advantage_change_mean: float | None  # absolute, over all that either keeps; one that is not kept has advantage 0
    advantage_change_both_mean: float | None  # the same over those that both keep


def rows_by(group: JudgedGroup, run: Run) -> list[Row]:
    """What the step would train on by the settings of `run`."""
    keep = kept_of(run)
    if verdict_on(group.young, keep) != "accepted":
        return []
    return rows_of(group.young, keep, run.roc, group.seed)


def considered(group: JudgedGroup, other: Run) -> list[Considered]:
    """All that the step might have trained on, in the order of their ids."""
    ours = {row.trajectory_id: row.advantage for row in group.rows}
    theirs = {row.trajectory_id: row.advantage for row in rows_by(group, other)}
    return [
        Considered(
            group_id=group.group_id,
            trajectory_id=each.trajectory_id,
            reward=each.reward,
            calls=each.calls,
            calls_failed=each.calls_failed,
            response_tokens=len(each.loss_mask) - each.prompt_tokens,
            advantage=ours.get(each.trajectory_id),
            other_advantage=theirs.get(each.trajectory_id),
        )
        for each in group.young
    ]


def difference(trajectories: Sequence[Considered]) -> Difference:
    run = [each for each in trajectories if each.advantage is not None]
    other = [each for each in trajectories if each.other_advantage is not None]
    both = [each for each in run if each.other_advantage is not None]
    either = [each for each in trajectories if each.advantage is not None or each.other_advantage is not None]
    return Difference(
        run=_kept(run),
        other=_kept(other),
        both=len(both),
        advantage_change_mean=_mean(_change(each) for each in either),
        advantage_change_both_mean=_mean(_change(each) for each in both),
    )


def _change(trajectory: Considered) -> float:
    return abs((trajectory.other_advantage or 0.0) - (trajectory.advantage or 0.0))


def _kept(trajectories: Sequence[Considered]) -> Kept:
    positives = [each for each in trajectories if each.reward > 0]
    calls = sum(each.calls for each in positives)
    return Kept(
        groups=len({each.group_id for each in trajectories}),
        trajectories=len(trajectories),
        positives=len(positives),
        failed_call_share=sum(each.calls_failed for each in positives) / calls if calls else None,
        response_tokens_mean=_mean(each.response_tokens for each in trajectories),
    )


def _mean(values: Iterable[float]) -> float | None:
    listed = list(values)
    return sum(listed) / len(listed) if listed else None

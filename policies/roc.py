"""Resample-on-Correct: which trajectories of a group are trained on (rStar2-Agent, arXiv 2508.20722, section 4).

Twice as many trajectories are rolled out as are kept. Correct ones are drawn with a probability inversely proportional
to p_total = p_err + p_format, so that clean ones are preferred; wrong ones uniformly, so that the ways to fail stay
diverse. The report's semantics are the default; `release` reproduces the public release, quirks included.
"""

from __future__ import annotations

from collections.abc import Sequence

from bus.messages import TrajectoryFinished
from configs.schema import Roc
from policies.draws import NEGATIVES, POSITIVES, mix, uniform

# What a clean trajectory's penalty counts as: 1 / p is infinite at 0. A clean one is a thousand times as likely to be
# drawn as one whose every call failed.
PENALTY_FLOOR = 1e-3


def error_penalty(trajectory: TrajectoryFinished, kind: str) -> float:
    """p_err: share of tool calls that failed; 0.5 where none was made."""
    if trajectory.calls == 0:
        return 0.5
    wrong = trajectory.responses_with_error if kind == "release" else trajectory.calls_failed
    return wrong / trajectory.calls


def format_penalty(trajectory: TrajectoryFinished, kind: str) -> float:
    """p_format: 1 if the answer tags are missing or unbalanced, else a share of the superfluous ones."""
    opens, closes = trajectory.answer_opens, trajectory.answer_closes
    if opens == 0 or opens != closes:
        return 1.0
    # The release counts headers on a text that lacks the first one.
    turns = trajectory.turns - 1 if kind == "release" else trajectory.turns
    if turns <= 0:
        return 1.0
    return min((opens - 1) / turns, 1.0)


def penalty(trajectory: TrajectoryFinished, roc: Roc) -> float:
    return error_penalty(trajectory, roc.penalty) + format_penalty(trajectory, roc.penalty)


def class_counts(positives: int, negatives: int, keep: int, roc: Roc) -> tuple[int, int]:
    """How many of each class are kept: their share of the group, which is half of each where half is kept.

    At least `roc.min_per_class` of each class where there are so many; halves are rounded to the even number.
    """
    wanted = round(positives * keep / (positives + negatives))
    wanted = max(wanted, min(roc.min_per_class, positives, keep // 2))
    wanted = min(wanted, keep - min(roc.min_per_class, negatives, keep // 2))
    return wanted, keep - wanted


def resample(group: Sequence[TrajectoryFinished], keep: int, roc: Roc, seed: int) -> list[TrajectoryFinished]:
    """The `keep` trajectories of a group to train on, in the group's order; all of them if there are no more."""
    if len(group) <= keep:
        return list(group)
    positives = [trajectory for trajectory in group if trajectory.reward > 0]
    negatives = [trajectory for trajectory in group if trajectory.reward <= 0]
    num_positives, num_negatives = class_counts(len(positives), len(negatives), keep, roc)
    chosen = _choose_positives(positives, num_positives, roc, mix(seed, POSITIVES))
    chosen |= _choose_negatives(negatives, num_negatives, roc, mix(seed, NEGATIVES))
    return [trajectory for trajectory in group if trajectory.trajectory_id in chosen]


def _choose_positives(positives: Sequence[TrajectoryFinished], count: int, roc: Roc, seed: int) -> set[int]:
    if roc.positives == "lowest":
        ranked = sorted(positives, key=lambda trajectory: penalty(trajectory, roc))  # ties by index: the sort is stable
        return {trajectory.trajectory_id for trajectory in ranked[:count]}
    return _draw(positives, [1.0 / max(penalty(t, roc), PENALTY_FLOOR) for t in positives], count, seed)


def _choose_negatives(negatives: Sequence[TrajectoryFinished], count: int, roc: Roc, seed: int) -> set[int]:
    if roc.negatives == "first":
        return {trajectory.trajectory_id for trajectory in negatives[:count]}
    return _draw(negatives, [1.0] * len(negatives), count, seed)


def _draw(pool: Sequence[TrajectoryFinished], weights: Sequence[float], count: int, seed: int) -> set[int]:
    """Without replacement, each draw in proportion to the weights: the largest u ** (1 / w) win
    (Efraimidis and Spirakis, 2006)."""
    keyed = [
        (uniform(seed, place) ** (1.0 / weight), trajectory.trajectory_id)
        for place, (trajectory, weight) in enumerate(zip(pool, weights, strict=True))
    ]
    return {trajectory_id for _, trajectory_id in sorted(keyed, reverse=True)[:count]}

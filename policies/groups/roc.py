"""Resample-on-Correct: selects the trajectories of a group to train on (rStar2-Agent, arXiv
2508.20722, section 4).

Half of the trajectories are kept. Correct ones are drawn with a probability inversely proportional
to p_total = p_err + p_format, which prefers clean ones; wrong ones uniformly, which keeps the
failure modes diverse. The default follows the report; `release` reproduces the public release,
quirks included.
"""

from collections.abc import Sequence

from bus.messages import TrajectoryFinished
from configs.algorithm import RocConfig
from policies.seeded_random import NEGATIVES, POSITIVES, draw_uniform, mix

# Minimum penalty, because 1 / p is infinite at 0. A clean trajectory is a thousand times as likely
# to be drawn as a trajectory with only failed calls.
PENALTY_FLOOR = 1e-3


def compute_error_penalty(trajectory: TrajectoryFinished, kind: str) -> float:
    """p_err: the share of failed tool calls; 0.5 without calls."""
    if trajectory.calls == 0:
        return 0.5
    wrong = trajectory.responses_with_error if kind == "release" else trajectory.calls_failed
    return wrong / trajectory.calls


def compute_format_penalty(trajectory: TrajectoryFinished, kind: str) -> float:
    """p_format: 1 for missing or unbalanced answer tags, else superfluous tags per turn."""
    opens, closes = trajectory.answer_opens, trajectory.answer_closes
    if opens == 0 or opens != closes:
        return 1.0
    # The release counts turn headers in a text without the first header.
    turns = trajectory.turns - 1 if kind == "release" else trajectory.turns
    if turns <= 0:
        return 1.0
    return min((opens - 1) / turns, 1.0)


def compute_penalty(trajectory: TrajectoryFinished, roc: RocConfig) -> float:
    return compute_error_penalty(trajectory, roc.penalty) + compute_format_penalty(trajectory, roc.penalty)


def compute_class_counts(positives: int, negatives: int, keep_count: int, roc: RocConfig) -> tuple[int, int]:
    """The positives and negatives to keep, in proportion to their share of the group.

    At least `roc.min_per_class` of each class, if there are that many; halves round to even.
    """
    num_positives = round(positives * keep_count / (positives + negatives))
    num_positives = max(num_positives, min(roc.min_per_class, positives, keep_count // 2))
    num_positives = min(num_positives, keep_count - min(roc.min_per_class, negatives, keep_count // 2))
    return num_positives, keep_count - num_positives


def resample(
    group: Sequence[TrajectoryFinished], keep_count: int, roc: RocConfig, seed: int
) -> list[TrajectoryFinished]:
    """The trajectories to train on, at most `keep_count`, in the group's order."""
    if len(group) <= keep_count:
        return list(group)
    positives = [trajectory for trajectory in group if trajectory.reward > roc.positive_above]
    negatives = [trajectory for trajectory in group if trajectory.reward <= roc.positive_above]
    num_positives, num_negatives = compute_class_counts(len(positives), len(negatives), keep_count, roc)
    chosen = _choose_positives(positives, num_positives, roc, mix(seed, POSITIVES))
    chosen |= _choose_negatives(negatives, num_negatives, roc, mix(seed, NEGATIVES))
    return [trajectory for trajectory in group if trajectory.trajectory_id in chosen]


def _choose_positives(positives: Sequence[TrajectoryFinished], count: int, roc: RocConfig, seed: int) -> set[int]:
    if roc.positives == "lowest":
        # Stable: ties by index.
        ranked = sorted(positives, key=lambda trajectory: compute_penalty(trajectory, roc))
        return {trajectory.trajectory_id for trajectory in ranked[:count]}
    return _draw(positives, [1.0 / max(compute_penalty(t, roc), PENALTY_FLOOR) for t in positives], count, seed)


def _choose_negatives(negatives: Sequence[TrajectoryFinished], count: int, roc: RocConfig, seed: int) -> set[int]:
    if roc.negatives == "first":
        return {trajectory.trajectory_id for trajectory in negatives[:count]}
    return _draw(negatives, [1.0] * len(negatives), count, seed)


def _draw(pool: Sequence[TrajectoryFinished], weights: Sequence[float], count: int, seed: int) -> set[int]:
    """Weighted draw without replacement: the largest u ** (1 / w) win (Efraimidis, Spirakis 2006)."""
    keyed = [
        (draw_uniform(seed, place) ** (1.0 / weight), trajectory.trajectory_id)
        for place, (trajectory, weight) in enumerate(zip(pool, weights, strict=True))
    ]
    return {trajectory_id for _, trajectory_id in sorted(keyed, reverse=True)[:count]}

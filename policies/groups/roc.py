"""Resample-on-Correct: selects the trajectories of a group to train on (rStar2-Agent, arXiv
2508.20722, section 4).

RoC keeps half of the trajectories. It draws correct trajectories with a probability inversely
proportional to p_total = p_err + p_format, which prefers clean trajectories. It draws wrong ones
uniformly, which keeps the failure modes diverse. The default follows the report; the penalty
`release` reproduces the public release with its quirks (docs/release.md).
"""

from collections.abc import Sequence

from asterism.bus.messages import ReleaseCounts, TrajectoryFinished
from asterism.configs.schema.algorithm import RocConfig
from asterism.configs.schema.success import SuccessRule
from asterism.policies.seeded_random import NEGATIVES, POSITIVES, draw_uniform, mix


def compute_error_penalty(trajectory: TrajectoryFinished, kind: str) -> float:
    """Return p_err: the share of failed tool calls, or 0.5 without calls."""
    if kind == "release":
        counts = trajectory.release or approximate_release_counts(trajectory)
        wrong, calls = counts.responses_with_error, counts.tool_responses
    else:
        wrong, calls = trajectory.calls_failed, trajectory.calls
    return wrong / calls if calls else 0.5


def compute_format_penalty(trajectory: TrajectoryFinished, kind: str) -> float:
    """Return p_format: 1 for missing, unbalanced, reversed or nested answer tags, else surplus answers per turn."""
    if kind == "release":
        counts = trajectory.release or approximate_release_counts(trajectory)
        opens, closes, spans, turns = counts.answer_opens, counts.answer_closes, counts.answer_spans, counts.turns
    else:
        opens, closes, spans = trajectory.answer_opens, trajectory.answer_closes, trajectory.answer_spans
        turns = trajectory.turns
    if opens == 0 or not opens == closes == spans or turns <= 0:
        return 1.0
    return min((spans - 1) / turns, 1.0)


def approximate_release_counts(trajectory: TrajectoryFinished) -> ReleaseCounts:
    """Approximate the counts of a run with roc.penalty = "report", which does not count the text of responses."""
    return ReleaseCounts(
        tool_responses=trajectory.calls,
        responses_with_error=trajectory.responses_with_error,
        answer_opens=trajectory.answer_opens,
        answer_closes=trajectory.answer_closes,
        answer_spans=trajectory.answer_spans,
        turns=trajectory.turns - 1,
    )


def compute_penalty(trajectory: TrajectoryFinished, roc: RocConfig) -> float:
    error = compute_error_penalty(trajectory, roc.penalty) if roc.error_penalty else 0.0
    return error + (compute_format_penalty(trajectory, roc.penalty) if roc.format_penalty else 0.0)


def compute_class_counts(positives: int, negatives: int, keep_count: int, roc: RocConfig) -> tuple[int, int]:
    """Return the numbers of positives and negatives to keep, in proportion to their shares of the group.

    The minima are `roc.min_positives` and `roc.min_negatives`, or fewer if fewer are available. If the
    rounded negatives do not exceed their minimum, the positives get the rest; else the negatives get
    what the rounded positives leave. Halves round to even.
    """
    size = positives + negatives
    num_positives, num_negatives = round(positives * keep_count / size), round(negatives * keep_count / size)
    fewest_negatives = min(roc.min_negatives, negatives, keep_count)
    if num_negatives <= fewest_negatives:
        num_positives = keep_count - fewest_negatives
    num_positives = max(num_positives, min(roc.min_positives, positives, keep_count))
    return num_positives, keep_count - num_positives


def resample(
    group: Sequence[TrajectoryFinished],
    keep_count: int,
    roc: RocConfig,
    seed: int,
    success: SuccessRule | None = None,
) -> list[TrajectoryFinished]:
    """Return the trajectories to train on, at most `keep_count`, in the group's order. `success` defines positives, by
    default with the limit roc.positive_above."""
    if len(group) <= keep_count:
        return list(group)
    success = success or SuccessRule(limit=roc.positive_above)
    positives = [each for each in group if success.is_met(each.reward, each.components)]
    negatives = [each for each in group if not success.is_met(each.reward, each.components)]
    num_positives, num_negatives = compute_class_counts(len(positives), len(negatives), keep_count, roc)
    chosen = _choose_positives(positives, num_positives, roc, mix(seed, POSITIVES))
    chosen |= _choose_negatives(negatives, num_negatives, roc, mix(seed, NEGATIVES))
    return [trajectory for trajectory in group if trajectory.trajectory_id in chosen]


def _choose_positives(positives: Sequence[TrajectoryFinished], count: int, roc: RocConfig, seed: int) -> set[int]:
    if roc.positives == "lowest":
        # A stable sort: equal penalties keep the order of the group.
        ranked = sorted(positives, key=lambda trajectory: compute_penalty(trajectory, roc))
        return {trajectory.trajectory_id for trajectory in ranked[:count]}
    return _draw(positives, [1.0 / max(compute_penalty(t, roc), roc.floor) for t in positives], count, seed)


def _choose_negatives(negatives: Sequence[TrajectoryFinished], count: int, roc: RocConfig, seed: int) -> set[int]:
    if roc.negatives == "first":
        return {trajectory.trajectory_id for trajectory in negatives[:count]}
    return _draw(negatives, [1.0] * len(negatives), count, seed)


def _draw(pool: Sequence[TrajectoryFinished], weights: Sequence[float], count: int, seed: int) -> set[int]:
    """Draw `count` ids by weight without replacement: the largest u ** (1 / w) win (Efraimidis, Spirakis 2006)."""
    keyed = [
        (draw_uniform(seed, place) ** (1.0 / weight), trajectory.trajectory_id)
        for place, (trajectory, weight) in enumerate(zip(pool, weights, strict=True))
    ]
    return {trajectory_id for _, trajectory_id in sorted(keyed, reverse=True)[:count]}

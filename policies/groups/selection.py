"""Selects the rows of a complete group: staleness bound, verdict, resampling, advantages."""

from collections.abc import Iterable, Sequence

from bus.messages import GroupJudged, StartGroup, TrainingSample, TrajectoryFinished, Verdict
from configs.algorithm import RlConfig, RocConfig
from configs.schema import RunConfig
from policies.groups.advantages import AdvantageEstimator, GroupFilter
from policies.groups.roc import resample
from policies.groups.staleness import apply_staleness_bound, compute_oldest_version


def compute_keep_count(run: RunConfig) -> int:
    """Trajectories of a group that RoC keeps; for plain GRPO, the minimum size."""
    return run.kept_trajectories if run.roc.enabled else 2


def select_fresh_trajectories(
    finished: Iterable[TrajectoryFinished], step: int, rl: RlConfig
) -> list[TrajectoryFinished]:
    """Within the staleness bound of `step` (all if `max_staleness` is 0), sorted by id."""
    ordered = sorted(finished, key=lambda trajectory: trajectory.trajectory_id)
    if not rl.max_staleness:
        return ordered
    oldest = compute_oldest_version(step, rl.max_staleness)
    aged = (apply_staleness_bound(trajectory, oldest, rl.stale_tokens) for trajectory in ordered)
    return [trajectory for trajectory in aged if trajectory is not None]


def judge_group(fresh: Sequence[TrajectoryFinished], keep_count: int, accepts: GroupFilter) -> Verdict:
    if len(fresh) < keep_count or len(fresh) < 2:
        return "lost"
    return "accepted" if accepts([trajectory.reward for trajectory in fresh]) else "rejected"


def describe_judgement(
    step: int, group: StartGroup, verdict: Verdict, fresh: Sequence[TrajectoryFinished], rows: Sequence[TrainingSample]
) -> GroupJudged:
    return GroupJudged(
        step=step,
        group_id=group.group_id,
        seed=group.seed,
        verdict=verdict,
        candidates=tuple(trajectory.trajectory_id for trajectory in fresh),
        rewards=tuple(trajectory.reward for trajectory in fresh),
        kept=tuple(row.trajectory_id for row in rows),
        advantages=tuple(row.advantage for row in rows),
        task=group.task,
    )


def build_training_rows(
    fresh: Sequence[TrajectoryFinished], keep_count: int, roc: RocConfig, seed: int, estimate: AdvantageEstimator
) -> list[TrainingSample]:
    """The rows of an accepted group; advantages are relative to the kept trajectories."""
    kept = resample(fresh, keep_count, roc, seed) if roc.enabled else fresh
    advantages = estimate([trajectory.reward for trajectory in kept])
    return [
        TrainingSample(
            trajectory_id=trajectory.trajectory_id,
            group_id=trajectory.group_id,
            advantage=advantage,
            record=trajectory.record,
        )
        for trajectory, advantage in zip(kept, advantages, strict=True)
    ]

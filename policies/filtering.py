"""Which of a complete group's trajectories a step trains on: old ones go, then the group is judged, then resampled."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from bus.messages import Row, TrajectoryFinished
from configs.schema import Rl, Roc, Run
from policies.advantages import group_advantages
from policies.roc import resample
from policies.staleness import oldest_version, young_enough

Verdict = Literal[
    "accepted", "lost", "equal"
]  # lost: too few are left; equal: their rewards, so that nothing is learned


def kept_of(run: Run) -> int:
    """Trajectories of a group that are trained on: G, half of what is rolled out. In plain GRPO all of them are, and as
    many there must be at least."""
    return run.rl.rollouts // 2 if run.roc.enabled else 2


def young_of(finished: Iterable[TrajectoryFinished], step: int, rl: Rl) -> list[TrajectoryFinished]:
    """What `step` may train on, in the order of ids. In the synchronous algorithm that is all of them: then the learner
    alone looks at versions."""
    ordered = sorted(finished, key=lambda trajectory: trajectory.trajectory_id)
    if not rl.max_staleness:
        return ordered
    oldest = oldest_version(step, rl.max_staleness)
    aged = (young_enough(trajectory, oldest, rl.too_old) for trajectory in ordered)
    return [trajectory for trajectory in aged if trajectory is not None]


def verdict_on(young: Sequence[TrajectoryFinished], keep: int) -> Verdict:
    if len(young) < keep or len(young) < 2:
        return "lost"
    return "equal" if len({trajectory.reward for trajectory in young}) == 1 else "accepted"


def rows_of(young: Sequence[TrajectoryFinished], keep: int, roc: Roc, seed: int) -> list[Row]:
    """Of an accepted group whose seed is `seed`, with the advantages that those kept have among each other."""
    kept = resample(young, keep, roc, seed) if roc.enabled else young
    advantages = group_advantages([trajectory.reward for trajectory in kept])
    return [
        Row(
            trajectory_id=trajectory.trajectory_id,
            group_id=trajectory.group_id,
            advantage=advantage,
            prompt_tokens=trajectory.prompt_tokens,
            token_ids=trajectory.token_ids,
            loss_mask=trajectory.loss_mask,
            logprobs=trajectory.logprobs,
            versions=trajectory.versions,
        )
        for trajectory, advantage in zip(kept, advantages, strict=True)
    ]

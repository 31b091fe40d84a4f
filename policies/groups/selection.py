"""Selects the rows of a complete group: staleness bound, filters, verdict, resampling, advantages."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from asterism.bus.messages import GroupAccepted, GroupJudged, StartGroup, TrainingSample, TrajectoryFinished, Verdict
from asterism.configs.schema.algorithm import RlConfig, RocConfig
from asterism.configs.schema.run_config import RunConfig
from asterism.configs.schema.success import SuccessRule
from asterism.policies.groups.advantages import AdvantageEstimator, load_advantage_estimator
from asterism.policies.groups.group_filters import GroupFilter, load_group_filter
from asterism.policies.groups.response_filters import compute_overlong_penalty, find_filter, list_filters
from asterism.policies.groups.roc import resample
from asterism.policies.groups.staleness import apply_staleness_bound, compute_oldest_version

MAX_PART_BYTES = 8 << 20  # maximum size of the tokens in one message to the learner
_TOKEN_BYTES = 13  # size of a token in TokenRecord


class SelectionRules(NamedTuple):
    """The settings that determine the rows of a group."""

    rl: RlConfig
    roc: RocConfig
    success: SuccessRule  # defines RoC's positives
    keep_count: int  # trajectories of a group that RoC keeps; for plain GRPO, the minimum size
    response_tokens: Mapping[str, int]  # length limit by task
    accepts_rewards: GroupFilter
    estimate_advantages: AdvantageEstimator

    @classmethod
    def from_config(cls, run: RunConfig) -> "SelectionRules":
        """Read the settings. Raises UnusableInput for a function that cannot be loaded."""
        return cls(
            rl=run.rl,
            roc=run.roc,
            success=run.success,
            keep_count=run.kept_trajectories if run.roc.enabled else 2,
            response_tokens={task.name: task.get_dialogue().response_tokens for task in run.resolved_tasks},
            accepts_rewards=load_group_filter(run.rl),
            estimate_advantages=load_advantage_estimator(run.rl),
        )


class GroupSelection(NamedTuple):
    verdict: Verdict
    rows: list[TrainingSample]  # rows of an accepted group; else empty
    dropped: Mapping[str, int]  # number of dropped trajectories by filter; empty without filters


def select_fresh_trajectories(
    finished: Iterable[TrajectoryFinished], step: int, rl: RlConfig
) -> list[TrajectoryFinished]:
    """Return the trajectories within the staleness bound of `step` (all if `max_staleness` is 0), sorted by id."""
    ordered = sorted(finished, key=lambda trajectory: trajectory.trajectory_id)
    if not rl.max_staleness:
        return ordered
    oldest = compute_oldest_version(step, rl.max_staleness)
    aged = (apply_staleness_bound(trajectory, oldest, rl.stale_tokens) for trajectory in ordered)
    return [trajectory for trajectory in aged if trajectory is not None]


def select_rows(
    rules: SelectionRules, fresh: Sequence[TrajectoryFinished], seed: int, task: str = ""
) -> GroupSelection:
    """Select the rows with the group's `seed`. Advantages are relative to the kept trajectories."""
    found = {trajectory.trajectory_id: find_filter(trajectory, rules.rl) for trajectory in fresh}
    counted = Counter(found.values())
    dropped: dict[str, int] = {each: counted[each] for each in list_filters(rules.rl)}
    trained = [trajectory for trajectory in fresh if found[trajectory.trajectory_id] is None]
    if len(trained) < rules.keep_count or len(trained) < 2:
        return GroupSelection("lost", [], dropped)
    if not rules.accepts_rewards(_shape_rewards(rules, trained, task)):
        return GroupSelection("rejected", [], dropped)
    kept = resample(trained, rules.keep_count, rules.roc, seed, rules.success) if rules.roc.enabled else trained
    advantages = rules.estimate_advantages(_shape_rewards(rules, kept, task))
    rows = [
        TrainingSample(each.trajectory_id, each.group_id, advantage, each.record)
        for each, advantage in zip(kept, advantages, strict=True)
    ]
    return GroupSelection("accepted", rows, dropped)


def split_accepted_group(step: int, group_id: int, rows: Iterable[TrainingSample]) -> list[GroupAccepted]:
    """Split the rows into messages of at most MAX_PART_BYTES of tokens; a longer trajectory has its own message."""
    parts, num_bytes = list[list[TrainingSample]](), 0
    for row in rows:
        size = _TOKEN_BYTES * row.record.num_tokens
        if not parts or num_bytes + size > MAX_PART_BYTES:
            parts.append([])
            num_bytes = 0
        parts[-1].append(row)
        num_bytes += size
    return [GroupAccepted(step, group_id, number, tuple(part)) for number, part in enumerate(parts)]


def _shape_rewards(rules: SelectionRules, trajectories: Sequence[TrajectoryFinished], task: str) -> list[float]:
    limit = rules.response_tokens[task]
    return [each.reward - compute_overlong_penalty(each, rules.rl, limit) for each in trajectories]


def describe_judgement(
    step: int, group: StartGroup, fresh: Sequence[TrajectoryFinished], selection: GroupSelection
) -> GroupJudged:
    return GroupJudged(
        step=step,
        group_id=group.group_id,
        seed=group.seed,
        verdict=selection.verdict,
        candidates=tuple(trajectory.trajectory_id for trajectory in fresh),
        rewards=tuple(trajectory.reward for trajectory in fresh),
        kept=tuple(row.trajectory_id for row in selection.rows),
        advantages=tuple(row.advantage for row in selection.rows),
        task=group.task,
    )

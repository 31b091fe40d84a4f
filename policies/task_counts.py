"""Sums counts over the trajectories of a step, a task or an evaluation, and computes their ratios.

A metric of trajectories is a field of TaskCounts, a line of `count_trajectory` and a line of `compute_ratios`.
"""

from collections.abc import Mapping
from operator import add
from typing import TypeVar

import msgspec
from msgspec.structs import astuple

from asterism.bus.messages import ComponentSum, TaskCounts, TrajectoryFailed, TrajectoryFinished, Verdict
from asterism.configs.schema.success import SuccessRule

Counts = TypeVar("Counts", bound=msgspec.Struct)  # a struct whose fields are numbers


def count_trajectory(event: TrajectoryFinished | TrajectoryFailed, success: SuccessRule) -> TaskCounts:
    """Return the counts of one trajectory."""
    if isinstance(event, TrajectoryFailed):
        return TaskCounts(trajectories_failed=1)
    positive = success.is_met(event.reward, event.components)
    return TaskCounts(
        trajectories=1,
        positives=int(positive),
        reward=event.reward,
        calls=event.calls,
        calls_failed=event.calls_failed,
        positive_calls=event.calls if positive else 0,
        positive_calls_failed=event.calls_failed if positive else 0,
        response_tokens=event.record.response_tokens,
    )


def count_group(verdict: Verdict) -> TaskCounts:
    """Return the counts of one group, without its trajectories."""
    return TaskCounts(groups=1, groups_lost=int(verdict == "lost"), groups_rejected=int(verdict == "rejected"))


def add_counts(counts: Counts, added: Counts) -> Counts:
    """Add each field."""
    return type(counts)(*map(add, astuple(counts), astuple(added)))


def add_by_name(counts: dict[str, Counts], added: Mapping[str, Counts]) -> dict[str, Counts]:
    """Add the counts of each name; an empty name is not counted."""
    named = {name: each for name, each in added.items() if name}
    return {
        **counts,
        **{name: add_counts(counts[name], each) if name in counts else each for name, each in named.items()},
    }


def add_components(sums: dict[str, ComponentSum], components: Mapping[str, float]) -> dict[str, ComponentSum]:
    """Add the components of one trajectory's reward."""
    return add_by_name(sums, {name: ComponentSum(value, 1) for name, value in components.items()})


# ---------------------------------------------------------------- ratios


def divide(numerator: float, denominator: float) -> float | None:
    """Return the ratio, or None if the denominator is 0."""
    return numerator / denominator if denominator else None


def drop_undefined(values: Mapping[str, float | None]) -> dict[str, float]:
    """Return the metrics without ratios of 0 to 0, which would look like measured zeros."""
    return {name: value for name, value in values.items() if value is not None}


def compute_mean_reward(total: float, trajectories: int) -> float | None:
    """Return the mean of a rounded sum, whose last digits depend on the order in which trajectories end."""
    return round(total, 9) / trajectories if trajectories else None


def compute_ratios(counts: TaskCounts) -> dict[str, float | None]:
    """Return shares and means over finished trajectories. An evaluation has no groups."""
    values = {
        "reward": compute_mean_reward(counts.reward, counts.trajectories),
        "positive_share": divide(counts.positives, counts.trajectories),
        "tool_errors": divide(counts.calls_failed, counts.calls),
        "errors_in_positives": divide(counts.positive_calls_failed, counts.positive_calls),
        "calls_per_rollout": divide(counts.calls, counts.trajectories),
        "response_tokens": divide(counts.response_tokens, counts.trajectories),
        "trajectories": float(counts.trajectories),
        "trajectories_failed": float(counts.trajectories_failed),
    }
    if counts.groups:
        names = ("groups", "groups_rejected", "groups_lost")
        values |= {name: float(getattr(counts, name)) for name in names}
    return values


def compute_answer_ratios(counts: TaskCounts) -> dict[str, float | None]:
    """Return the metrics of an evaluation or of one of its sets."""
    ratios = compute_ratios(counts)
    return {
        "accuracy": ratios["positive_share"],
        "reward": ratios["reward"],
        "questions": float(counts.ended),
        "failed": ratios["trajectories_failed"],
        "response_tokens": ratios["response_tokens"],
    }

"""Computes the metrics of steps and evaluations. Their names are interfaces: docs/metrics.md lists them."""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from asterism.bus.messages import (
    ComponentSum,
    EvaluationFinished,
    LengthsMeasured,
    StalenessCounts,
    StepCounts,
    TaskCounts,
)
from asterism.policies.task_counts import (
    compute_answer_ratios,
    compute_mean_reward,
    compute_ratios,
    divide,
    drop_undefined,
)


class StepTimes(msgspec.Struct):
    """Start times of a step's phases in seconds, and the counts of the phases."""

    step: int = 0
    requested: float = 0.0
    collected: float = 0.0
    trained: float = 0.0
    counts: StepCounts = StepCounts()
    failures: dict[str, int] = {}
    training: dict[str, float] = {}
    staleness: StalenessCounts | None = None


class PrefillCounts(msgspec.Struct):
    """Counters of an engine at its last report and at the end of the previous step."""

    incarnation: int = 0
    prefilled: int = 0
    recomputed: int = 0
    prefilled_before: int = 0
    recomputed_before: int = 0


def trim_overlap(times: StepTimes, previous_end: float) -> StepTimes:
    """Return `times` without the part before `previous_end`, the end of the previous step."""
    requested = max(times.requested, previous_end)
    collected = max(times.collected, requested)
    return replace(times, requested=requested, collected=collected, trained=max(times.trained, collected))


def compute_step_metrics(times: StepTimes, weights_synced_at: float) -> dict[str, float]:
    """Return the times of the three phases, which add up to `step_s`; waits are means over trajectories, in seconds."""
    counts, trajectories = times.counts, times.counts.totals.trajectories
    rollout_s, train_s = times.collected - times.requested, times.trained - times.collected
    step_s = weights_synced_at - times.requested
    values = {
        **compute_ratios(counts.totals),
        **compute_component_metrics(counts.components),
        **name_ratios("task", counts.tasks, compute_ratios),
        **_name_values("tool {}: calls", {name: each.calls for name, each in counts.tools.items()}),
        **_name_values("tool {}: timed_out", {name: each.timed_out for name, each in counts.tools.items()}),
        "overlong_share": divide(counts.endings.get("length", 0), trajectories),
        **_name_values("ended: {}", counts.endings),
        **_name_values("trajectories_dropped: {}", counts.dropped),
        "generated_tokens": float(counts.generated_tokens),
        "tokens_per_s": divide(counts.generated_tokens, rollout_s if times.staleness is None else step_s),
        "step_s": step_s,
        "rollout_s": rollout_s,
        "train_s": train_s,
        "weights_s": weights_synced_at - times.trained,
        "wait_lease_s": divide(counts.lease_wait_s, trajectories),
        "wait_generation_s": divide(counts.generation_s, trajectories),
        "wait_tools_s": divide(counts.tools_s, trajectories),
        "wait_grading_s": divide(counts.grading_s, trajectories),
        **{name: value for name, value in times.training.items() if name != "train_s"},
        **_name_values("failed: {}", times.failures),
        **compute_staleness_metrics(times.staleness),
    }
    return drop_undefined(values)


def _name_values(pattern: str, values: Mapping[Any, int]) -> dict[str, float]:
    return {pattern.format(name): float(value) for name, value in sorted(values.items())}


def compute_prefill_metrics(prefills: Mapping[str, PrefillCounts]) -> dict[str, float]:
    """Return the recomputed share of prefills since the last call, over all engines, or nothing without a prefill."""
    prefilled = sum(counts.prefilled - counts.prefilled_before for counts in prefills.values())
    recomputed = sum(counts.recomputed - counts.recomputed_before for counts in prefills.values())
    for counts in prefills.values():
        counts.prefilled_before, counts.recomputed_before = counts.prefilled, counts.recomputed
    return drop_undefined({"recomputed_share": divide(recomputed, prefilled)})


def compute_component_metrics(components: Mapping[str, ComponentSum]) -> dict[str, float | None]:
    """Return means over the trajectories that have the component."""
    return {
        f"reward: {name}": compute_mean_reward(each.total, each.trajectories)
        for name, each in sorted(components.items())
    }


def name_ratios(
    kind: str, counts: Mapping[str, TaskCounts], compute: Callable[[TaskCounts], dict[str, float | None]]
) -> dict[str, float | None]:
    """Return ratios by "KIND NAME: METRIC"."""
    return {
        f"{kind} {name}: {metric}": value
        for name, each in sorted(counts.items())
        for metric, value in compute(each).items()
    }


def compute_evaluation_metrics(event: EvaluationFinished) -> dict[str, float]:
    values = {
        **compute_answer_ratios(event.totals),
        **compute_component_metrics(event.components),
        **name_ratios("task", event.tasks, compute_ratios),
        **name_ratios("set", event.sets, compute_answer_ratios),
        "version": float(event.version),
        "other_version_tokens": float(event.other_version_tokens),
    }
    return drop_undefined(values)


def compute_staleness_metrics(counts: StalenessCounts | None) -> dict[str, float]:
    """Return mean and maximum in versions, over the tokens in the loss."""
    if counts is None:
        return {}
    values = {
        "staleness_mean": divide(counts.versions_behind, counts.tokens),
        "staleness_max": float(counts.max_versions_behind),
        "stale_tokens_masked": float(counts.tokens_masked),
        "stale_trajectories_dropped": float(counts.trajectories_dropped),
    }
    return drop_undefined(values)


def compute_length_metrics(measured: LengthsMeasured) -> dict[str, float]:
    """Return the effect on lengths of ending a step with its first complete groups.

    `length_bias` is 1 without an effect. With aborted trajectories it is an upper bound, because
    they count with the tokens that they had.
    """
    values: dict[str, float | None] = {
        "aborted_trajectories": float(measured.aborted),
        "late_trajectories": float(measured.finished_late),
    }
    for name, counts in (("taken", measured.completed), ("started", measured.started)):
        values |= {
            f"{name}_response_tokens": divide(counts.response_tokens, counts.trajectories),
            f"{name}_overlong_share": divide(counts.overlong, counts.trajectories),
            f"{name}_trajectories": float(counts.trajectories),
        }
    values["length_bias"] = divide(values["taken_response_tokens"] or 0.0, values["started_response_tokens"] or 0.0)
    return drop_undefined(values)

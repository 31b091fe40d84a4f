"""The recorder: metrics of steps and evaluations, and the numbers of the terminal display.

The time of a step starts at its request, or at the end of the previous step if rollouts run ahead
of the learner. So the times of all steps add up, and `rollout_s` is the learner's waiting time.
"""

from collections.abc import Mapping, Sequence

import msgspec
from msgspec.structs import replace

from asterism.bus.addresses import LAUNCHER, METRICS
from asterism.bus.messages import (
    AnyMessage,
    ComponentSum,
    EngineLoadReported,
    EvaluationFinished,
    GroupJudged,
    HealthReported,
    LengthsMeasured,
    MetricsRecorded,
    Progress,
    ProtocolError,
    RunFailed,
    RunStarted,
    StalenessCounts,
    StepCollected,
    StepCounts,
    StepRequested,
    StepTrained,
    TaskCounts,
    ToolCount,
    WeightsProbed,
    WeightsSynced,
    name_evaluation,
)
from asterism.configs.health_options import HealthConfig
from asterism.policies.decider import Send
from asterism.policies.health.health_monitor import Finding, HealthState, check_evaluation, check_step
from asterism.policies.health.weight_probes import WeightProbes
from asterism.policies.step_evaluations import START_LABELS


def divide(numerator: float, denominator: float) -> float | None:
    """None if the denominator is 0."""
    return numerator / denominator if denominator else None


def drop_undefined(values: Mapping[str, float | None]) -> dict[str, float]:
    """The metrics without ratios of 0 to 0, which would look like measured zeros."""
    return {name: value for name, value in values.items() if value is not None}


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
    """Counters of an engine: as of its last report, and at the end of the previous step."""

    incarnation: int = 0
    prefilled: int = 0
    recomputed: int = 0
    prefilled_before: int = 0
    recomputed_before: int = 0


class RecorderState(msgspec.Struct):
    last_step: int = 0  # the last ended one
    last_step_ended_at: float = 0.0
    open_steps: list[StepTimes] = []  # requested and not ended
    health: HealthState = msgspec.field(default_factory=HealthState)
    prefills: dict[str, PrefillCounts] = {}  # by engine
    probes: WeightProbes = msgspec.field(default_factory=WeightProbes)


class Recorder:
    """A decider (asterism.policies.decider.Decider): one line of metrics for each step and evaluation, and health checks."""

    def __init__(self, steps: int, health: HealthConfig | None = None) -> None:
        self._steps = steps
        self._health = health or HealthConfig()  # until RunStarted, since a resumed run may have other limits
        self.state = RecorderState()

    def decide(self, now: float, event: AnyMessage) -> Sequence[Send]:
        match event:
            case RunStarted(step=step, health=health):
                self._health = health or self._health
                self.state = RecorderState(last_step=step, last_step_ended_at=now)
                self.state.health.history.run_steps = max(0, self._steps - step)
            case StepRequested(step=step):
                self.state.open_steps.append(StepTimes(step=step, requested=now))
            case StepCollected():
                times = self._find_times(event.step)
                times.collected = now
                times.counts, times.failures, times.staleness = event.counts, event.failures, event.staleness
            case StepTrained():
                # Not the cold start or the checkpoint of a resumed run.
                if event.step > self.state.last_step:
                    times = self._find_times(event.step)
                    if times.trained:
                        raise ProtocolError(f"step {event.step} was already trained")
                    times.trained, times.training = now, event.metrics
            case WeightsProbed():
                self.state.probes.add_probe(event, self._health)
            case WeightsSynced(version=version):
                return self._on_weights_synced(version, now)
            case EvaluationFinished():
                return self._on_evaluation_finished(event)
            case MetricsRecorded(kind="sft"):
                return [Send(METRICS, event)]
            case EngineLoadReported():
                self._on_engine_load_reported(event)
            case GroupJudged():  # only for the log
                pass
            case LengthsMeasured():
                metrics = compute_length_metrics(event)
                return [Send(METRICS, MetricsRecorded("lengths", event.step, "", metrics))]
            case _:
                raise ProtocolError(f"the recorder does not accept {type(event).__name__}")
        return []

    def get_state_after(self, event: AnyMessage) -> msgspec.Struct | None:
        return self.state

    def _find_times(self, step: int) -> StepTimes:
        for times in self.state.open_steps:
            if times.step == step:
                return times
        raise ProtocolError(f"step {step} was not requested")

    def _on_weights_synced(self, version: int, now: float) -> list[Send]:
        """The steps up to this version have ended; a late engine can skip versions."""
        ended = [times for times in self.state.open_steps if times.step <= version]
        return [send for times in ended for send in self._end_step(times, now)]

    def _end_step(self, times: StepTimes, now: float) -> list[Send]:
        values = compute_step_metrics(trim_overlap(times, self.state.last_step_ended_at), now)
        values |= compute_prefill_metrics(self.state.prefills)
        self.state.probes.add_step(values)
        values |= self.state.probes.take_metrics(times.step, self._health)
        step = times.step
        self.state.open_steps.remove(times)
        self.state.last_step, self.state.last_step_ended_at = step, now
        return [
            Send(METRICS, MetricsRecorded("step", step, "", values)),
            Send(LAUNCHER, Progress("rl", step, self._steps, values)),
            *report_findings(step, check_step(self.state.health, values, self._health)),
        ]

    def _on_engine_load_reported(self, event: EngineLoadReported) -> None:
        """The counters of a new incarnation start at 0. A report of an earlier incarnation is late."""
        known = self.state.prefills.get(event.engine, PrefillCounts())
        if event.incarnation < known.incarnation:
            raise ProtocolError(f"incarnation {event.incarnation} of {event.engine} had already left")
        if event.incarnation > known.incarnation:
            known = PrefillCounts(event.incarnation)
        known.prefilled, known.recomputed = event.prefilled_tokens, event.recomputed_tokens
        self.state.prefills[event.engine] = known

    def _on_evaluation_finished(self, event: EvaluationFinished) -> list[Send]:
        answered = event.questions - event.failed
        values = {
            "accuracy": divide(event.positives, answered),
            "reward": compute_mean_reward(event.reward, answered),
            **compute_component_metrics(event.components),
            **compute_task_metrics(event.tasks),
            **compute_set_metrics(event.sets),
            "questions": float(event.questions),
            "failed": float(event.failed),
            "response_tokens": divide(event.response_tokens, answered),
        }
        if event.version >= 0:
            values |= {"version": float(event.version), "other_version_tokens": float(event.other_version_tokens)}
        step = self.state.last_step if event.version < 0 else event.version
        kind, is_start = event.label.rpartition("_")[2], event.label == START_LABELS[0]
        self.state.health.history.add_evaluation(
            drop_undefined(values), self._health.window_steps, kind=kind, version=step, is_start=is_start
        )
        name = name_evaluation(event.label, event.version)
        return [
            Send(METRICS, MetricsRecorded("evaluation", step, event.label, drop_undefined(values))),
            Send(LAUNCHER, Progress(name, step, self._steps, drop_undefined(values))),
            *report_findings(self.state.last_step, check_evaluation(self.state.health, self._health)),
        ]


def report_findings(step: int, findings: Sequence[Finding]) -> list[Send]:
    effects: list[Send] = []
    for finding in findings:
        reported = HealthReported(step, finding.check, finding.action, finding.message, finding.checks)
        effects += [Send(METRICS, reported), Send(LAUNCHER, reported)]
        if finding.action == "stop":
            effects.append(Send(LAUNCHER, RunFailed(f"step {step}: {finding.message}")))
    return effects


def trim_overlap(times: StepTimes, previous_end: float) -> StepTimes:
    """`times` without the part before `previous_end`, the end of the previous step."""
    requested = max(times.requested, previous_end)
    collected = max(times.collected, requested)
    return replace(times, requested=requested, collected=collected, trained=max(times.trained, collected))


def compute_step_metrics(times: StepTimes, weights_synced_at: float) -> dict[str, float]:
    """The three phases add up to `step_s`; waits are means over trajectories, in seconds."""
    counts = times.counts
    rollout_s, train_s = times.collected - times.requested, times.trained - times.collected
    step_s = weights_synced_at - times.requested
    failures = {f"failed: {cause}": float(count) for cause, count in times.failures.items()}
    values = {
        "reward": compute_mean_reward(counts.reward, counts.trajectories),
        "positive_share": divide(counts.positives, counts.trajectories),
        **compute_component_metrics(counts.components),
        **compute_task_metrics(counts.tasks),
        "errors_in_positives": divide(counts.positive_calls_failed, counts.positive_calls),
        "tool_errors": divide(counts.calls_failed, counts.calls),
        **compute_tool_metrics(counts.tools),
        "calls_per_rollout": divide(counts.calls, counts.trajectories),
        "response_tokens": divide(counts.response_tokens, counts.trajectories),
        "overlong_share": divide(counts.endings.get("length", 0), counts.trajectories),
        **{f"ended: {ending}": float(count) for ending, count in sorted(counts.endings.items())},
        "groups": float(counts.groups),
        "groups_rejected": float(counts.groups_rejected),
        "groups_lost": float(counts.groups_lost),
        **{f"trajectories_dropped: {name}": float(count) for name, count in sorted(counts.dropped.items())},
        "trajectories": float(counts.trajectories),
        "trajectories_failed": float(counts.trajectories_failed),
        "generated_tokens": float(counts.generated_tokens),
        "tokens_per_s": divide(counts.generated_tokens, rollout_s if times.staleness is None else step_s),
        "step_s": step_s,
        "rollout_s": rollout_s,
        "train_s": train_s,
        "weights_s": weights_synced_at - times.trained,
        "wait_lease_s": divide(counts.lease_wait_s, counts.trajectories),
        "wait_generation_s": divide(counts.generation_s, counts.trajectories),
        "wait_tools_s": divide(counts.tools_s, counts.trajectories),
        "wait_grading_s": divide(counts.grading_s, counts.trajectories),
        **{name: value for name, value in times.training.items() if name != "train_s"},
        **failures,
        **compute_staleness_metrics(times.staleness),
    }
    return drop_undefined(values)


def compute_prefill_metrics(prefills: Mapping[str, PrefillCounts]) -> dict[str, float]:
    """The share since the previous call, over all engines; empty without a prefill."""
    prefilled = sum(counts.prefilled - counts.prefilled_before for counts in prefills.values())
    recomputed = sum(counts.recomputed - counts.recomputed_before for counts in prefills.values())
    for counts in prefills.values():
        counts.prefilled_before, counts.recomputed_before = counts.prefilled, counts.recomputed
    return drop_undefined({"recomputed_share": divide(recomputed, prefilled)})


def compute_mean_reward(total: float, trajectories: int) -> float | None:
    """The sum is rounded, because its last digits depend on the order in which trajectories end."""
    return round(total, 9) / trajectories if trajectories else None


def compute_component_metrics(components: Mapping[str, ComponentSum]) -> dict[str, float | None]:
    """Means over the trajectories that have the component."""
    return {
        f"reward: {name}": compute_mean_reward(each.total, each.trajectories)
        for name, each in sorted(components.items())
    }


def compute_tool_metrics(tools: Mapping[str, ToolCount]) -> dict[str, float | None]:
    """By "tool NAME: calls" and "tool NAME: timed_out"."""
    return {
        f"tool {name}: {metric}": float(value)
        for name, each in sorted(tools.items())
        for metric, value in (("calls", each.calls), ("timed_out", each.timed_out))
    }


def compute_task_metrics(tasks: Mapping[str, TaskCounts]) -> dict[str, float | None]:
    """By "task NAME: METRIC"; shares and means are over the task's trajectories."""
    metrics: dict[str, float | None] = {}
    for name, counts in sorted(tasks.items()):
        values: dict[str, float | None] = {
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
            values |= {
                "groups": float(counts.groups),
                "groups_rejected": float(counts.groups_rejected),
                "groups_lost": float(counts.groups_lost),
            }
        metrics |= {f"task {name}: {metric}": value for metric, value in values.items()}
    return metrics


def compute_set_metrics(sets: Mapping[str, TaskCounts]) -> dict[str, float | None]:
    """By "set NAME: METRIC", for the sets of an evaluation."""
    metrics: dict[str, float | None] = {}
    for name, counts in sorted(sets.items()):
        values: dict[str, float | None] = {
            "accuracy": divide(counts.positives, counts.trajectories),
            "reward": compute_mean_reward(counts.reward, counts.trajectories),
            "questions": float(counts.trajectories + counts.trajectories_failed),
            "failed": float(counts.trajectories_failed),
            "response_tokens": divide(counts.response_tokens, counts.trajectories),
        }
        metrics |= {f"set {name}: {metric}": value for metric, value in values.items()}
    return metrics


def compute_staleness_metrics(counts: StalenessCounts | None) -> dict[str, float]:
    """Mean and maximum in versions, over the tokens in the loss."""
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
    """The effect on lengths of ending a step with its first complete groups.

    `length_bias` is 1 without an effect. With aborted trajectories it is an upper bound, because
    they count with the tokens that they had.
    """
    taken, started = measured.completed, measured.started
    taken_tokens = divide(taken.response_tokens, taken.trajectories)
    started_tokens = divide(started.response_tokens, started.trajectories)
    values = {
        "length_bias": divide(taken_tokens or 0.0, started_tokens or 0.0),
        "taken_response_tokens": taken_tokens,
        "started_response_tokens": started_tokens,
        "taken_overlong_share": divide(taken.overlong, taken.trajectories),
        "started_overlong_share": divide(started.overlong, started.trajectories),
        "taken_trajectories": float(taken.trajectories),
        "started_trajectories": float(started.trajectories),
        "aborted_trajectories": float(measured.aborted),
        "late_trajectories": float(measured.finished_late),
    }
    return drop_undefined(values)

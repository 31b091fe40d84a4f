"""Records a line of metrics for each step and evaluation, the numbers of the terminal display, and health checks.

The time of a step starts at its request, or at the end of the previous step if rollouts run ahead
of the learner. So the times of all steps add up, and `rollout_s` is the learner's waiting time.
"""

from collections.abc import Sequence

import msgspec

from asterism.bus.addresses import LAUNCHER, METRICS
from asterism.bus.messages import (
    AnyMessage,
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
    StepCollected,
    StepRequested,
    StepTrained,
    WeightsProbed,
    WeightsSynced,
    name_evaluation,
)
from asterism.configs.schema.health import HealthConfig
from asterism.policies.decider import Send
from asterism.policies.health.health_monitor import Finding, HealthState, check_evaluation, check_step
from asterism.policies.health.weight_probes import WeightProbes
from asterism.policies.step_evaluations import START_LABELS
from asterism.policies.step_metrics import (
    PrefillCounts,
    StepTimes,
    compute_evaluation_metrics,
    compute_length_metrics,
    compute_prefill_metrics,
    compute_step_metrics,
    trim_overlap,
)


class RecorderState(msgspec.Struct):
    last_step: int = 0  # number of the last ended step
    last_step_ended_at: float = 0.0
    open_steps: list[StepTimes] = []  # steps that are requested and not ended
    health: HealthState = msgspec.field(default_factory=HealthState)
    prefills: dict[str, PrefillCounts] = {}  # counts by engine
    probes: WeightProbes = msgspec.field(default_factory=WeightProbes)


class Recorder:
    """A decider (asterism.policies.decider.Decider) that records metrics."""

    def __init__(self, steps: int, health: HealthConfig | None = None) -> None:
        self._steps = steps
        self._health = health or HealthConfig()  # until RunStarted, because a resumed run may have other limits
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
                # Ignores the cold start and the checkpoint of a resumed run.
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
            case GroupJudged():  # GroupJudged serves only the log
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
        """End the steps up to this version; a late engine can skip versions."""
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
        """Count an engine's work. Counters of a new incarnation start at 0; reports of an earlier one are late."""
        known = self.state.prefills.get(event.engine, PrefillCounts())
        if event.incarnation < known.incarnation:
            raise ProtocolError(f"incarnation {event.incarnation} of {event.engine} had already left")
        if event.incarnation > known.incarnation:
            known = PrefillCounts(event.incarnation)
        known.prefilled, known.recomputed = event.prefilled_tokens, event.recomputed_tokens
        self.state.prefills[event.engine] = known

    def _on_evaluation_finished(self, event: EvaluationFinished) -> list[Send]:
        values = compute_evaluation_metrics(event)
        kind, is_start = event.label.rpartition("_")[2], event.label == START_LABELS[0]
        self.state.health.history.add_evaluation(
            values, self._health.window_steps, kind=kind, version=event.version, is_start=is_start
        )
        name = name_evaluation(event.label, event.version)
        return [
            Send(METRICS, MetricsRecorded("evaluation", event.version, event.label, values)),
            Send(LAUNCHER, Progress(name, event.version, self._steps, values)),
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

"""Orders a run: weights, first evaluation, RL steps, last evaluation.

    weights of step v on every engine --> evaluate (v = 0, or the last step)
                                      --> StepRequested(v + 1 ... v + 1 + max_staleness)
                                      --> every `evaluation.every` steps: evaluate at the same time

With max_staleness = 0 a step starts when every engine holds the weights of the previous step: the
algorithm is synchronous. With k > 0 up to k further steps are collected while the learner trains,
and engines load weights during turns: tokens for a step are at most k versions older than the
policy that the step updates. asterism.policies.step_evaluations describes how an evaluation that runs
alongside the rollouts keeps its weights.

The run does not wait for engines that have left. An engine that joins gets the newest weights, and the run then waits
for it. Weights are sent with the engine's incarnation, because the bus may repeat them to the next incarnation, when
the run already uses newer weights. A learner that restarts from a checkpoint repeats its messages; repetitions are
ignored.

If learner and engines share GPUs, the learner requests the engines' memory before it trains. Each engine, including
engines that join later, ends its turns and releases its memory. When all are asleep, the learner trains; the weights
that it publishes end the handover:

    GpuMemoryRequested --> EngineSleepRequested to every engine --> EngineAsleep from every engine
    --> GpuMemoryGranted --> WeightsPublished
"""

from collections.abc import Sequence
from typing import Literal

import msgspec

from asterism.bus.addresses import BUFFER, LAUNCHER, LEARNER, RECORDER
from asterism.bus.messages import (
    AnyMessage,
    EarlyStopDecided,
    EngineAsleep,
    EngineJoined,
    EngineLeft,
    EngineSleepRequested,
    EvaluationFinished,
    GpuMemoryGranted,
    GpuMemoryRequested,
    ProtocolError,
    RunFinished,
    RunStarted,
    StepCollected,
    StepRequested,
    StepTrained,
    WeightsLoaded,
    WeightsProbed,
    WeightsPublished,
    WeightsSynced,
)
from asterism.configs.schema.algorithm import EarlyStoppingConfig
from asterism.policies.decider import Send
from asterism.policies.early_stopping import EarlyStopping, compute_last_step, describe_outcome
from asterism.policies.step_evaluations import EvaluationPlan, StepEvaluations


class EngineWeights(msgspec.Struct):
    incarnation: int = 1
    announced_version: int = -1  # newest version that was sent to the engine
    loaded_version: int = -1


class GpuMemoryHandover(msgspec.Struct):
    """The latest handover of the engines' memory to the learner."""

    incarnation: int  # the learner's incarnation
    version: int  # version in GpuMemoryRequested
    phase: Literal["requested", "granted", "over"] = "requested"
    sleeping: dict[str, int] = {}  # incarnations of the engines that released their memory


class RecipeState(msgspec.Struct):
    engines: dict[str, EngineWeights] = {}  # engines that have joined, or are expected at the start of the run
    departed: dict[str, int] = {}  # last departed incarnation of each engine
    newest: WeightsPublished | None = None
    last_trained_step: int = -1
    synced_version: int = -1  # newest version that every engine has loaded
    last_requested_step: int = -1
    pending_evaluations: list[str] = []  # labels of evaluations to finish before the next step
    # Unset until the learner requests the engines' memory.
    handover: GpuMemoryHandover | msgspec.UnsetType = msgspec.UNSET
    step_evaluations: StepEvaluations | msgspec.UnsetType = msgspec.UNSET  # unset without evaluations during training
    early_stopping: EarlyStopping | msgspec.UnsetType = msgspec.UNSET  # unset without [early_stopping]

    @property
    def version(self) -> int:
        return -1 if self.newest is None else self.newest.version

    @property
    def open_handover(self) -> GpuMemoryHandover | None:
        return self.handover if isinstance(self.handover, GpuMemoryHandover) and self.handover.phase != "over" else None

    @property
    def awake_engines(self) -> list[str]:
        """The engines that have not released their memory yet."""
        if (handover := self.open_handover) is None:
            return []
        return [name for name, engine in self.engines.items() if handover.sleeping.get(name) != engine.incarnation]


class Recipe:
    """A decider (asterism.policies.decider.Decider). The run starts with `engines`."""

    def __init__(
        self,
        plan: EvaluationPlan,
        engines: tuple[str, ...],
        max_staleness: int = 0,
        early_stopping: EarlyStoppingConfig | None = None,
    ) -> None:
        self._plan = plan
        self._early_stopping = early_stopping or EarlyStoppingConfig()
        self._engines = engines
        self._max_staleness = max_staleness
        self._reset()

    def _reset(self) -> None:
        self.state = RecipeState(engines={name: EngineWeights() for name in self._engines})
        if any(self._plan.intervals):
            self.state.step_evaluations = StepEvaluations()
        if self._early_stopping.window_steps:
            self.state.early_stopping = EarlyStopping()

    @property
    def _last_step(self) -> int:
        """The run's last step: rl.steps, unless a rule of early stopping holds."""
        early = self.state.early_stopping
        return (early.last_step if early else 0) or self._plan.steps

    def decide(self, now: float, event: AnyMessage) -> Sequence[Send]:
        match event:
            case RunStarted():
                self._reset()
                if early := self.state.early_stopping:
                    early.restore(
                        event.earlier_steps, event.step, self._early_stopping, self._plan.steps, self._max_staleness
                    )
                return []
            case EngineJoined():
                return self._on_engine_joined(event)
            case EngineLeft():
                return self._on_engine_left(event)
            case WeightsPublished():
                return self._on_weights_published(event)
            case WeightsLoaded():
                return self._on_weights_loaded(event)
            case GpuMemoryRequested():
                return self._on_gpu_memory_requested(event)
            case EngineAsleep():
                return self._on_engine_asleep(event)
            case EvaluationFinished(label=label):
                return self._on_evaluation_finished(label)
            case StepCollected():
                return self._on_step_collected(event)
            case StepTrained(step=step):
                if step <= self.state.last_trained_step:
                    return self._on_learner_restarted()
                self.state.last_trained_step = step
                return [Send(RECORDER, event)]
            case _:
                raise ProtocolError(f"the recipe does not accept {type(event).__name__}")

    def get_state_after(self, event: AnyMessage) -> msgspec.Struct | None:
        return self.state

    # ---------------------------------------------------------------- engines and their weights

    def _on_engine_joined(self, event: EngineJoined) -> list[Send]:
        known = self.state.engines.get(event.engine)
        is_stale = known is not None and event.incarnation < known.incarnation
        if is_stale or event.incarnation <= self.state.departed.get(event.engine, 0):
            raise ProtocolError(f"incarnation {event.incarnation} of {event.engine} had already left")
        is_new = known is None or event.incarnation > known.incarnation
        if is_new:
            self.state.engines[event.engine] = EngineWeights(event.incarnation)
        if (handover := self.state.open_handover) is None:
            return self._announce_weights()
        if not is_new:
            return []  # the request was already sent
        # The handover ends with newer weights: do not send the current ones.
        self.state.engines[event.engine].announced_version = self.state.version
        return [Send(event.engine, EngineSleepRequested(handover.incarnation, handover.version))]

    def _on_engine_left(self, event: EngineLeft) -> list[Send]:
        if event.incarnation <= self.state.departed.get(event.engine, 0):
            raise ProtocolError(f"incarnation {event.incarnation} of {event.engine} had already left")
        self.state.departed[event.engine] = event.incarnation
        known = self.state.engines.get(event.engine)
        if known is not None and known.incarnation <= event.incarnation:
            del self.state.engines[event.engine]
        return [*self._advance_if_synced(), *self._grant_gpu_memory_if_asleep()]

    def _on_weights_published(self, event: WeightsPublished) -> list[Send]:
        """Send new weights. A restarted learner may publish a version again; engines that loaded it keep it."""
        state = self.state
        if event.version < state.version:
            raise ProtocolError(f"version {event.version} after version {state.version}")
        if state.newest is None:  # weights of the learner's checkpoint, from which the steps continue
            state.last_requested_step = event.version
        if state.newest is not None and event.version == state.version and event.digest != state.newest.digest:
            for engine in state.engines.values():  # the version was trained again, with other bits
                engine.loaded_version = min(engine.loaded_version, event.version - 1)
        state.newest = event
        if evaluations := state.step_evaluations:
            is_due = self._plan.is_due(event.version) and state.synced_version < event.version < self._last_step
            evaluations.on_published(event, hold=is_due)
        if (handover := state.open_handover) is not None:
            if handover.phase == "requested" or event.version < handover.version:
                return []
            handover.phase = "over"
        for engine in state.engines.values():  # after a handover, engines have no weights
            engine.announced_version = min(engine.announced_version, engine.loaded_version) if handover is None else -1
        return self._announce_weights()

    def _announce_weights(self) -> list[Send]:
        """Send each engine the newest weights, or the newest that evaluations allow."""
        weights = self.state.newest
        if weights is None:
            return []
        if evaluations := self.state.step_evaluations:
            loaded_versions = [engine.loaded_version for engine in self.state.engines.values()]
            weights = evaluations.choose_weights(weights, loaded_versions)
        effects: list[Send] = []
        for name, engine in self.state.engines.items():
            if engine.announced_version < weights.version:
                engine.announced_version = weights.version
                effects.append(Send(name, msgspec.structs.replace(weights, incarnation=engine.incarnation)))
        return effects

    def _on_learner_restarted(self) -> list[Send]:
        """Handle a restart: the learner repeats StepTrained, and then publishes only its newest weights."""
        if not self.state.step_evaluations:
            return []
        self.state.step_evaluations.skip_unstarted()
        return self._announce_weights() if self.state.open_handover is None else []

    def _on_weights_loaded(self, event: WeightsLoaded) -> list[Send]:
        engine = self.state.engines.get(event.engine)
        if engine is None or engine.incarnation != event.incarnation:
            raise ProtocolError(f"incarnation {event.incarnation} of {event.engine} loaded weights, but is not joined")
        if event.version > engine.announced_version:
            raise ProtocolError(
                f"{event.engine} loaded version {event.version}, but the newest sent one is {engine.announced_version}"
            )
        engine.loaded_version = max(engine.loaded_version, event.version)
        return [*_report_probe(self.state.newest, event), *self._advance_if_synced()]

    def _advance_if_synced(self) -> list[Send]:
        """Request the next evaluation or steps once every engine holds newer weights."""
        state = self.state
        synced_version = min((engine.loaded_version for engine in state.engines.values()), default=state.synced_version)
        if synced_version <= state.synced_version:
            return []
        state.synced_version = synced_version
        state.pending_evaluations = self._plan.list_labels(synced_version, self._last_step)
        return [Send(RECORDER, WeightsSynced(synced_version)), *self._request_next()]

    # ---------------------------------------------------------------- the engines' memory

    def _on_gpu_memory_requested(self, event: GpuMemoryRequested) -> list[Send]:
        """Request the engines' memory; a restarted learner requests again, and sleeping engines confirm again."""
        last, request_key = self.state.handover, (event.learner_incarnation, event.version)
        if isinstance(last, GpuMemoryHandover) and request_key <= (last.incarnation, last.version):
            raise ProtocolError(
                f"incarnation {event.learner_incarnation} of the learner requested memory "
                f"for version {event.version} twice"
            )
        evaluations = self.state.step_evaluations
        if evaluations and evaluations.is_running:
            evaluations.deferred = event
            return []
        self.state.handover = GpuMemoryHandover(event.learner_incarnation, event.version)
        request = EngineSleepRequested(event.learner_incarnation, event.version)
        return [*(Send(name, request) for name in self.state.engines), *self._grant_gpu_memory_if_asleep()]

    def _on_engine_asleep(self, event: EngineAsleep) -> list[Send]:
        handover, engine = self.state.open_handover, self.state.engines.get(event.engine)
        is_joined = engine is not None and engine.incarnation == event.incarnation
        if (
            handover is None
            or not is_joined
            or event.request != EngineSleepRequested(handover.incarnation, handover.version)
        ):
            raise ProtocolError(f"incarnation {event.incarnation} of {event.engine} was not requested to sleep")
        handover.sleeping[event.engine] = event.incarnation
        return self._grant_gpu_memory_if_asleep()

    def _grant_gpu_memory_if_asleep(self) -> list[Send]:
        handover = self.state.open_handover
        if handover is None or handover.phase == "granted" or self.state.awake_engines:
            return []
        handover.phase = "granted"
        return [Send(LEARNER, GpuMemoryGranted(handover.incarnation, handover.version))]

    # ---------------------------------------------------------------- evaluations and steps

    def _on_step_collected(self, event: StepCollected) -> list[Send]:
        """Apply early stopping: the new last step has not been requested yet, so that the learner saves it."""
        early = self.state.early_stopping
        if not early or early.last_step:
            return []
        cause = early.record(describe_outcome(event), self._early_stopping)
        last_step = compute_last_step(event.step, self._max_staleness)
        if not cause or last_step > self._plan.steps:
            return []
        early.last_step = last_step
        return [Send(LAUNCHER, EarlyStopDecided(event.step, early.last_step, cause))]

    def _on_evaluation_finished(self, label: str) -> list[Send]:
        evaluations = self.state.step_evaluations
        if evaluations and evaluations.is_running and label == self._plan.step_label:
            return self._end_step_evaluation(evaluations)
        if not self.state.pending_evaluations or self.state.pending_evaluations[0] != label:
            raise ProtocolError(f"evaluation {label} was not requested")
        del self.state.pending_evaluations[0]
        return self._request_next()

    def _end_step_evaluation(self, evaluations: StepEvaluations) -> list[Send]:
        evaluations.end()
        deferred, evaluations.deferred = evaluations.deferred, None
        if deferred is not None:
            return [*self._request_next(), *self._on_gpu_memory_requested(deferred)]
        announced = self._announce_weights() if self.state.open_handover is None else []
        return [*announced, *self._request_next()]

    def _request_next(self) -> list[Send]:
        """Request evaluations or steps, but only steps during an evaluation alongside the rollouts."""
        state, evaluations = self.state, self.state.step_evaluations
        if evaluations and evaluations.is_running:
            return self._request_steps()
        if state.pending_evaluations:
            return [Send(BUFFER, self._plan.build_request(state.pending_evaluations[0], state.synced_version))]
        if state.synced_version >= self._last_step:
            return [Send(BUFFER, RunFinished(state.synced_version))]
        if evaluations and evaluations.begin(state.synced_version):
            request = self._plan.build_request(self._plan.step_label, state.synced_version)
            return [Send(BUFFER, request), *self._request_steps()]
        return self._request_steps()

    def _request_steps(self) -> list[Send]:
        state, last_step = self.state, self._last_step
        effects: list[Send] = []
        while state.last_requested_step < min(state.synced_version + 1 + self._max_staleness, last_step):
            state.last_requested_step += 1
            is_last = state.last_requested_step == last_step < self._plan.steps
            request = StepRequested(state.last_requested_step, state.synced_version, is_last)
            effects += [Send(RECORDER, request), Send(BUFFER, request)]
        return effects


def _report_probe(weights: WeightsPublished | None, event: WeightsLoaded) -> list[Send]:
    """Report a probe for the health check, unless the learner has published newer weights since."""
    if weights is None or weights.probe is None or not event.probe_logprobs or event.version != weights.version:
        return []
    chosen_at, learner = weights.probe.chosen_at, weights.probe.logprobs
    return [Send(RECORDER, WeightsProbed(event.engine, event.version, chosen_at, learner, event.probe_logprobs))]

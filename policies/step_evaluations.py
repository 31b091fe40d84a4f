"""Decides when an evaluation during training is due, and which weights engines may load meanwhile.

An evaluation of version v runs alongside the rollouts of the next steps. Its tokens must be of version v, so the run
withholds newer weights from the engines until the evaluation ends. The learner trains meanwhile. Engines that join get
version v: its shared memory remains readable, because the learner publishes at most `rl.max_staleness` + 1 versions
after v until the engines load one of them.

Two faults end the hold early, so that the run never waits for weights that are lost:

    the learner restarts        publishes only its newest weights; evaluations that have not begun are skipped
    all engines of v are lost   engines load the newest weights; EvaluationFinished counts their tokens
"""

from collections.abc import Collection
from typing import NamedTuple

import msgspec

from asterism.bus.messages import EvaluationRequested, GpuMemoryRequested, WeightsPublished
from asterism.configs.schema.algorithm import GREEDY, Sampling
from asterism.configs.schema.run_config import RunConfig

START_LABELS = ("start_sampled", "start_greedy")
END_LABELS = ("end_sampled", "end_greedy")


class EvaluationPlan(NamedTuple):
    """The evaluations of a run of `steps` steps."""

    steps: int
    questions: int = 0  # limit of questions per set
    intervals: tuple[int, ...] = ()  # steps between evaluations, by set; 0 or none: only at the start and at the end
    step_label: str = "step_sampled"
    sampling: Sampling = Sampling()  # sampling parameters of evaluations that are not greedy

    @classmethod
    def from_config(cls, run: RunConfig) -> "EvaluationPlan":
        options = run.evaluation
        most = max((each.questions for each in run.resolved_evaluation_sets), default=0)
        return cls(
            steps=run.rl.steps,
            questions=most if options.questions else 0,
            intervals=options.intervals,
            step_label=f"step_{options.during}",
            sampling=run.evaluation_sampling,
        )

    def list_labels(self, step: int, last_step: int) -> list[str]:
        """List the evaluations during which no step is collected. `last_step`: the run's last step."""
        if not self.questions:
            return []
        labels = START_LABELS if step == 0 else ()
        return [*labels, *(END_LABELS if step == last_step else ())]

    def is_due(self, version: int) -> bool:
        """Return whether the version is evaluated during training."""
        return 0 < version < self.steps and any(each > 0 and version % each == 0 for each in self.intervals)

    def build_request(self, label: str, version: int) -> EvaluationRequested:
        sampling = GREEDY if label.endswith("greedy") else self.sampling
        return EvaluationRequested(label, sampling, self.questions, version)


class StepEvaluations(msgspec.Struct):
    """State of the evaluations during training."""

    held: list[WeightsPublished] = []  # versions to evaluate, in order; engines get no newer weights than the first
    version: int = -1  # version in evaluation; -1: none
    deferred: GpuMemoryRequested | None = None  # the learner's request, deferred until the evaluation in flight ends

    @property
    def is_running(self) -> bool:
        return self.version >= 0

    def on_published(self, published: WeightsPublished, *, hold: bool) -> None:
        """Hold a version, unless it is held already: a restarted learner publishes a version again."""
        is_held = any(each.version == published.version for each in self.held)
        self.held = [published if each.version == published.version else each for each in self.held]
        if hold and not is_held:
            self.held.append(published)

    def skip_unstarted(self) -> None:
        self.held = [each for each in self.held if each.version == self.version]

    def begin(self, synced_version: int) -> bool:
        """Begin the evaluation of `synced_version` if it is due; return whether it begins."""
        self.held = [each for each in self.held if each.version >= synced_version]
        if self.is_running or not self.held or self.held[0].version != synced_version:
            return False
        self.version = synced_version
        return True

    def end(self) -> None:
        self.held = [each for each in self.held if each.version != self.version]
        self.version = -1

    def choose_weights(self, newest: WeightsPublished, loaded_versions: Collection[int]) -> WeightsPublished:
        """Return the weights to send. `loaded_versions`: one for each engine."""
        if not self.held:
            return newest
        first = self.held[0]
        if first.version != self.version or self.version in loaded_versions:
            return first
        return self.held[1] if len(self.held) > 1 else newest  # all engines of `first` are lost

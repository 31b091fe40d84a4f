"""The metrics of the last steps that health checks read, with the extremes of the whole run."""

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise

import msgspec

from asterism.configs.schema.health import MAX_WINDOW_STEPS
from asterism.policies.health.evaluation_drop import MAX_POINTS, EvaluationPoint, list_points

METRICS_READ = (
    *("reward", "positive_share", "errors_in_positives", "overlong_share", "groups", "groups_rejected"),
    *("trajectories", "trajectories_failed", "recomputed_share", "updates", "updates_skipped", "loss", "grad_norm"),
    *("clip_fraction", "entropy", "mismatch_k3", "mismatch_above_1", "lr"),
    *("mismatch_confident", "staleness_max"),
    *("probe_engines", "probe_gap", "probe_mismatch", "probe_moved", "probe_followed", "probe_since"),
    *("probe_unmoved_engines",),
)
MAX_FINITE = 1e100  # larger values count as infinite, so that sums and means are finite
FAILURE_PREFIX = "failed: "  # prefix of the counts of masked trajectories by cause
TOOL_PREFIX = "tool "  # prefix of "tool NAME: calls" and "tool NAME: timed_out"


class StepHistory(msgspec.Struct):
    """A part of the recorder's state, which is empty at each launch of the run."""

    steps: list[dict[str, float]] = []  # metrics of the newest MAX_WINDOW_STEPS steps, the oldest first
    # Means over a window; None before the first complete window.
    first_reward: float | None = None
    best_reward: float | None = None
    lowest_tool_errors: float | None = None
    # Rewards before any update, for reward_drop: of the sampled evaluation at the start, and of the first step.
    start_reward: float | None = None
    first_step_reward: float | None = None
    # Totals of the launch, evaluations included.
    num_steps: int = 0
    run_steps: int = 0  # configured steps of the whole run; 0: unknown
    updates: float = 0.0
    trajectories: float = 0.0
    failed: float = 0.0
    failures: dict[str, float] = {}  # failed trajectories of steps, by the part that failed
    evaluations: dict[str, list[EvaluationPoint]] = {}  # by set and kind of sampling

    def add_step(self, values: Mapping[str, float], window_steps: int) -> None:
        names = [name for name in values if name in METRICS_READ or name.startswith((FAILURE_PREFIX, TOOL_PREFIX))]
        self.steps.append({name: values[name] for name in names})
        del self.steps[:-MAX_WINDOW_STEPS]
        self._add_totals(values)
        if (reward := self.compute_mean("reward", window_steps)) is not None:
            self.first_reward = reward if self.first_reward is None else self.first_reward
            self.best_reward = max(reward, self.best_reward if self.best_reward is not None else reward)
        if (errors := self.compute_mean("errors_in_positives", window_steps)) is not None:
            lowest = self.lowest_tool_errors
            self.lowest_tool_errors = errors if lowest is None else min(errors, lowest)

    def add_evaluation(
        self, values: Mapping[str, float], window_steps: int, *, kind: str, version: int, is_start: bool
    ) -> None:
        """`kind`: "sampled" or "greedy". `is_start`: the sampled evaluation before the first step, with its weights."""
        reward = self.compute_mean("reward", window_steps)
        for name, point in list_points(values, version, reward).items():
            points = self.evaluations.setdefault(f"{name} {kind}".strip(), [])
            points.append(point)
            del points[:-MAX_POINTS]
        failed = sum_finite([values.get("failed", 0.0)])
        self.trajectories += sum_finite([values.get("questions", 0.0)]) - failed
        self.failed += failed
        if is_start and is_finite(reward := values.get("reward", math.nan)):
            self.start_reward = reward

    def _add_totals(self, values: Mapping[str, float]) -> None:
        self.num_steps += 1
        self.updates += sum_finite([values.get("updates", 0.0), -values.get("updates_skipped", 0.0)])
        self.trajectories += sum_finite([values.get("trajectories", 0.0)])
        self.failed += sum_finite([values.get("trajectories_failed", 0.0)])
        for name in filter(lambda name: name.startswith(FAILURE_PREFIX), values):
            part = name.removeprefix(FAILURE_PREFIX)
            self.failures[part] = sum_finite([self.failures.get(part, 0.0), values[name]])
        reward = values.get("reward", math.nan)
        if self.num_steps == 1 and is_finite(reward):
            self.first_step_reward = reward

    def find_reference_reward(self) -> float | None:
        """Return the lower of two rewards before any update: of the first step, and of the evaluation at the start."""
        known = [each for each in (self.first_step_reward, self.start_reward) if each is not None]
        return min(known) if self.first_step_reward is not None else None

    def compute_noise(self, name: str) -> float:
        """Return the median change between two steps, on which a single large drop has no effect."""
        values = self.list_values(name)
        changes = [abs(value - before) for before, value in pairwise(values)]
        return statistics.median(changes) if changes else 0.0

    def list_tools(self) -> list[str]:
        """List the tools with calls in the newest step."""
        names = self.steps[-1] if self.steps else {}
        suffix = ": calls"
        return [
            name[len(TOOL_PREFIX) : -len(suffix)]
            for name in names
            if name.startswith(TOOL_PREFIX) and name.endswith(suffix)
        ]

    def list_values(self, name: str) -> list[float]:
        """List the finite values of all steps, the oldest first."""
        return [value for step in self.steps if is_finite(value := step.get(name, math.nan))]

    def list_newest(self, name: str, steps: int) -> list[float]:
        """List the newest `steps` finite values, or none if there are fewer, or if the newest step lacks one."""
        has_newest = bool(self.steps) and is_finite(self.steps[-1].get(name, math.nan))
        values = self.list_values(name) if has_newest else []
        return values[-steps:] if len(values) >= steps else []

    def compute_mean(self, name: str, steps: int) -> float | None:
        """Return the mean of the values of `list_newest`, or None without values."""
        values = self.list_newest(name, steps)
        return statistics.fmean(values) if values else None

    def sum_newest(self, name: str, steps: int) -> float:
        """Return the sum over the newest `steps` steps; missing and non-finite values count as 0."""
        return sum_finite([step.get(name, 0.0) for step in self.steps[-steps:]])


def is_finite(value: float) -> bool:
    return abs(value) < MAX_FINITE  # false for NaN


def sum_finite(values: Sequence[float]) -> float:
    return math.fsum(value for value in values if is_finite(value))

"""Compares the probes of an engine with those of the learner, to check that the engine has the published weights.

L and E are the changes of the learner's and of the engine's log probabilities of the same prompts, between two
versions. With the published weights, E = L + noise, where the noise is the mismatch of engine and learner. Without the
published weights, E is noise. The expected share sum(E L) / sum(L L) is 1 in the first case, and 0 in the second case.
The comparison takes place when L exceeds the noise by far, so that it covers several small updates. A version that the
engine has followed is the start of the next comparison, so that the loss of any version is found equally soon.
"""

import math
import statistics
from collections.abc import Mapping, Sequence

import msgspec

from asterism.bus.messages import WeightsProbed
from asterism.configs.schema.health import HealthConfig
from asterism.policies.health.step_history import is_finite

MIN_MOVEMENT = 1e-3  # least movement L to compare, a root mean square in nats
MOVEMENT_FACTOR = 4.0  # least ratio of the movement L to the mismatch, to compare them
# Limits of sum(E L) / sum(L L). Between the two limits, the comparison continues with the next version.
UNMOVED_BELOW, MOVED_ABOVE = 0.25, 0.5
MAX_MISMATCHES = 100  # number of mismatches, from the first steps, to keep for the median


class ProbeReference(msgspec.Struct, frozen=True):
    """The probe of an engine at which a comparison of movements starts."""

    chosen_at: int
    version: int
    learner: tuple[float, ...]
    engine: tuple[float, ...]


class ProbeFigures(msgspec.Struct):
    """The figures of one probe: `gap` (nats); after a comparison also `moved` (nats), `followed`, `since` (version)."""

    version: int
    values: dict[str, float]


class WeightProbes(msgspec.Struct):
    """A part of the recorder's state, which is empty at each launch of the run."""

    references: dict[str, ProbeReference] = {}  # by engine
    mismatches: list[float] = []  # mismatch of the tokens of each of the first steps without stale tokens
    newest: dict[str, ProbeFigures] = {}  # the last probe of each engine since the last step

    def add_probe(self, event: WeightsProbed, health: HealthConfig) -> None:
        """Compare the probe with the reference. Changed prompts or a non-finite value start a new comparison."""
        learner, engine = event.learner_logprobs, event.engine_logprobs
        if len(learner) != len(engine) or not all(map(is_finite, (*learner, *engine))):
            self.references.pop(event.engine, None)
            return
        figures = {"gap": compute_rms(_subtract(engine, learner))}
        self.newest[event.engine] = ProbeFigures(event.version, figures)
        reference = self.references.get(event.engine)
        newest = ProbeReference(event.chosen_at, event.version, learner, engine)
        if reference is None or reference.chosen_at != event.chosen_at or reference.version >= event.version:
            self.references[event.engine] = newest
            return
        moved = _subtract(learner, reference.learner)
        limit = max(MIN_MOVEMENT, MOVEMENT_FACTOR * self.compute_mismatch(health))
        if compute_rms(moved) < limit:
            return
        followed = _divide_movements(_subtract(engine, reference.engine), moved)
        figures |= {"moved": compute_rms(moved), "followed": followed, "since": float(reference.version)}
        if followed > MOVED_ABOVE:
            self.references[event.engine] = newest

    def add_step(self, values: Mapping[str, float]) -> None:
        """Store the mismatch of the step's tokens as a root mean square: for small differences, the KL estimate k3 is
        half of their mean square."""
        k3 = values.get("mismatch_k3", math.nan)
        if is_finite(k3) and values.get("staleness_max", 0.0) == 0.0 and len(self.mismatches) < MAX_MISMATCHES:
            self.mismatches.append(math.sqrt(2 * max(0.0, k3)))

    def compute_mismatch(self, health: HealthConfig) -> float:
        """Return the median mismatch; without a measured step, the mismatch at `health.mismatch_k3_nats`."""
        return statistics.median(self.mismatches) if self.mismatches else math.sqrt(2 * health.mismatch_k3_nats)

    def take_metrics(self, step: int, health: HealthConfig) -> dict[str, float]:
        """Return the figures of the probes since the previous call: the engines' largest gap and smallest share.

        The figures leave out the probe of a restarted engine: it probes weights of an ended step, at a time that no
        event of the run determines.
        """
        probes, self.newest = [each.values for each in self.newest.values() if each.version >= step], {}
        if not probes:
            return {}
        metrics = {
            "probe_engines": float(len(probes)),
            "probe_gap": max(each["gap"] for each in probes),
            "probe_mismatch": self.compute_mismatch(health),
        }
        compared = [each for each in probes if "followed" in each]
        if compared:
            least = min(compared, key=lambda each: each["followed"])
            metrics |= {f"probe_{name}": least[name] for name in ("moved", "followed", "since")}
            metrics["probe_unmoved_engines"] = float(sum(each["followed"] < UNMOVED_BELOW for each in compared))
        return metrics


def compute_rms(values: Sequence[float]) -> float:
    return math.sqrt(statistics.fmean(value * value for value in values)) if values else 0.0


def _subtract(values: Sequence[float], others: Sequence[float]) -> list[float]:
    return [value - other for value, other in zip(values, others, strict=True)]


def _divide_movements(engine: Sequence[float], learner: Sequence[float]) -> float:
    """Return the least-squares factor from the learner's movement, which is not zero, to the engine's movement."""
    pairs = zip(engine, learner, strict=True)
    return math.fsum(of_engine * own for of_engine, own in pairs) / math.fsum(own * own for own in learner)

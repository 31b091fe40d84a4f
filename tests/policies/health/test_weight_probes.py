"""The comparison of probes finds an engine without the published weights, for any size of updates and noise."""

import random

import pytest
from msgspec.structs import replace

from asterism.bus import messages as msg
from asterism.bus.messages.steps import WeightProbe
from asterism.configs.schema.health import HealthConfig
from asterism.policies.health.weight_probes import WeightProbes
from asterism.policies.recipe import Recipe
from asterism.policies.recorder import Recorder
from asterism.policies.step_evaluations import EvaluationPlan
from tests.policies.health.histories import list_step_events

HEALTH = HealthConfig()
PROMPTS = 16


class Scenario:
    """A learner that moves by `movement` nats per version, and an engine that loses the versions in `lost`.

    `noise` is the standard deviation of errors in the engine's log probabilities.
    """

    def __init__(self, movement: float, noise: float, lost: range = range(0), seed: int = 0, renewal: int = 0) -> None:
        self._random, self._noise = random.Random(seed), noise
        self.probes = WeightProbes(mismatches=[noise])
        self._learner = [-self._random.uniform(0.1, 2.0) for _ in range(PROMPTS)]
        self._drift = [self._random.gauss(0.0, 1.0) for _ in range(PROMPTS)]
        self._movement, self._lost, self._renewal = movement, lost, renewal
        self._held = list(self._learner)

    def run_version(self, version: int) -> dict[str, float]:
        for number in range(PROMPTS):
            step = 0.7 * self._drift[number] + 0.7 * self._random.gauss(0.0, 1.0)
            self._learner[number] += self._movement * step
        if version not in self._lost:
            self._held = list(self._learner)
        engine = tuple(each + self._random.gauss(0.0, self._noise) for each in self._held)
        chosen_at = version // self._renewal * self._renewal if self._renewal else 1
        event = msg.WeightsProbed("generator-0", version, chosen_at, tuple(self._learner), engine)
        self.probes.add_probe(event, HEALTH)
        return self.probes.take_metrics(version, HEALTH)

    def find_unmoved(self, versions: int) -> list[int]:
        metrics = {version: self.run_version(version) for version in range(1, versions + 1)}
        return [version for version, each in metrics.items() if each.get("probe_unmoved_engines", 0.0) > 0]


@pytest.mark.slow
@pytest.mark.parametrize("noise", [1e-6, 0.003, 0.02])
@pytest.mark.parametrize("movement", [0.0, 1e-4, 3e-3, 0.05, 1.0])
def test_an_engine_that_loads_every_version_is_never_reported(movement: float, noise: float) -> None:
    for seed in range(10):
        assert Scenario(movement, noise, seed=seed, renewal=100).find_unmoved(300) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("movement", "noise", "delay"), [(0.05, 1e-6, 0), (1e-4, 1e-6, 20), (0.05, 0.02, 5), (3e-3, 0.02, 60)]
)
@pytest.mark.parametrize("first", [2, 40])
def test_lost_versions_are_found_when_the_policy_has_moved_beyond_the_noise(
    movement: float, noise: float, delay: int, first: int
) -> None:
    """Detection takes longer if the engine has loaded earlier versions."""
    delay = delay if first == 2 else 4 * delay
    for seed in range(10):
        found = Scenario(movement, noise, range(first, 10_000), seed).find_unmoved(first + delay + 1)
        assert found
        assert first <= found[0] <= first + delay


def test_the_only_engine_that_keeps_its_first_weights_is_counted() -> None:
    probes, metrics = WeightProbes(mismatches=[1e-6]), dict[str, float]()
    for version, (learner, stuck) in enumerate([(-1.0, -1.0), (-0.8, -1.0), (-0.6, -1.0)], 1):
        probes.add_probe(msg.WeightsProbed("generator-0", version, 1, (learner,), (learner,)), HEALTH)
        probes.add_probe(msg.WeightsProbed("generator-1", version, 1, (learner,), (stuck,)), HEALTH)
        metrics = probes.take_metrics(version, HEALTH)
    assert metrics["probe_engines"] == 2
    assert metrics["probe_unmoved_engines"] == 1
    assert metrics["probe_followed"] == 0
    assert metrics["probe_since"] == 1
    assert metrics["probe_moved"] == metrics["probe_gap"] == pytest.approx(0.4)
    assert probes.take_metrics(3, HEALTH) == {}


def test_reloaded_versions_and_values_that_are_not_finite_are_not_compared() -> None:
    probes = WeightProbes(mismatches=[1e-6])
    for version, learner in ((5, -1.0), (5, -0.5), (4, -0.3), (6, float("nan")), (7, -0.1)):
        probes.add_probe(msg.WeightsProbed("generator-0", version, 1, (learner,), (-1.0,)), HEALTH)
        assert "probe_moved" not in probes.take_metrics(version, HEALTH)


def test_the_metrics_of_a_step_exclude_probes_of_ended_steps() -> None:
    """A restarted engine can send a probe of an ended step at any time."""
    probes = WeightProbes(mismatches=[1e-6])
    probes.add_probe(msg.WeightsProbed("generator-0", 2, 1, (-1.0,), (-1.0,)), HEALTH)
    probes.add_probe(msg.WeightsProbed("generator-1", 1, 1, (-1.0,), (-1.5,)), HEALTH)
    metrics = probes.take_metrics(2, HEALTH)
    assert (metrics["probe_engines"], metrics["probe_gap"]) == (1.0, 0.0)


def test_the_mismatch_covers_only_steps_without_stale_tokens() -> None:
    probes = WeightProbes()
    default = probes.compute_mismatch(HEALTH)
    probes.add_step({"mismatch_k3": 0.5, "staleness_max": 1.0})
    probes.add_step({"mismatch_k3": float("nan")})
    probes.add_step({})
    assert probes.compute_mismatch(HEALTH) == default == pytest.approx(0.3162, abs=1e-4)
    for k3 in (2e-4, 2e-4, 0.02):
        probes.add_step({"mismatch_k3": k3, "staleness_max": 0.0})
    assert probes.compute_mismatch(HEALTH) == pytest.approx(0.02)


def test_the_recipe_compares_only_the_newest_version_and_the_step_has_the_metrics() -> None:
    recipe, recorder = Recipe(EvaluationPlan(2, 0), ("generator-0",)), Recorder(2, HEALTH)
    for decider in (recipe, recorder):
        decider.decide(0.0, msg.RunStarted(0, msg.BufferCursor()))
    published = msg.WeightsPublished(0, "/dev/shm/w", 8, "d", 0)
    probe = WeightProbe(1, (b"abcd",), (-0.5,))
    recipe.decide(0.0, published)
    unprobed = recipe.decide(0.0, msg.WeightsLoaded("generator-0", 0, 0.1))
    assert not any(isinstance(send.message, msg.WeightsProbed) for send in unprobed)
    for event in list_step_events(1, msg.StepCounts())[:-1]:
        recorder.decide(0.0, event)
    recipe.decide(0.0, replace(published, version=1, digest="e", probe=probe))
    sent = [each.message for each in recipe.decide(0.0, msg.WeightsLoaded("generator-0", 1, 0.1, 1, (-0.75,)))]
    assert sent[:2] == [msg.WeightsProbed("generator-0", 1, 1, (-0.5,), (-0.75,)), msg.WeightsSynced(1)]
    assert not recorder.decide(1.0, sent[0])
    values = recorder.decide(1.0, sent[1])[0].message.values  # pyright: ignore[reportAttributeAccessIssue]
    assert (values["probe_gap"], values["probe_engines"]) == (0.25, 1.0)
    assert [each.message for each in recipe.decide(0.0, msg.WeightsLoaded("generator-0", 0, 0.1, 1, (-0.1,)))] == []

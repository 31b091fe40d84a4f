"""Whole runs under a virtual clock with evaluations alongside the rollouts."""

from collections.abc import Iterator

import numpy as np
import pytest
from msgspec.structs import replace

from asterism.bus import messages as msg
from asterism.bus.addresses import HEAD, ROLLOUT
from asterism.configs.schema.algorithm import EvaluationConfig, RlConfig
from asterism.configs.schema.dialogue import DialogueConfig
from asterism.configs.schema.machines import EngineConfig
from asterism.configs.schema.run_config import RunConfig
from asterism.configs.schema.sglang import SGLangConfig
from tests.engine.learner.learner_settings import make_learner
from tests.simulation.clock import run_virtually
from tests.simulation.invariants import check, check_the_counts, launches, messages
from tests.simulation.seeds import select_seeds
from tests.simulation.world import Faults, World

RUN = RunConfig(
    name="evaluated",
    dialogue=DialogueConfig(prompt_tokens=16, response_tokens=400),
    engine=EngineConfig(kv_tokens=2048, num_engines=2),
    learner=make_learner(every=1),
    rl=RlConfig(steps=5, prompts=4, rollouts=4, max_refill_groups=2),
    evaluation=EvaluationConfig(questions=4, every=2),
)
COLOCATED = replace(RUN, engine=replace(RUN.engine, kind="sglang"), sglang=SGLangConfig(colocate=True))
AHEAD = replace(RUN, rl=replace(RUN.rl, max_staleness=1), evaluation=EvaluationConfig(questions=4, every=1))
SEEDS = select_seeds(40, fast=(1,), per_change=4)


def simulate(run: RunConfig, seed: int, failure_rate: float = 0.0, faults: Faults | None = None) -> World:
    world = World(run, seed, failure_rate, faults)
    assert run_virtually(world.simulate()) == msg.RunFinished(run.rl.steps)
    check(world)
    return world


def list_evaluations(world: World, label: str) -> list[msg.EvaluationFinished]:
    events = [event for event in launches(world, HEAD)[-1] if event.actor == "recipe"]
    found = (message for message in messages(events) if isinstance(message, msg.EvaluationFinished))
    return [message for message in found if message.label == label]


def iter_answers(world: World) -> Iterator[tuple[msg.StartGroup, msg.TrajectoryFinished]]:
    """Yield the evaluations' trajectories of the last launch."""
    groups = {
        each.group_id: each
        for each in messages(launches(world, ROLLOUT)[-1])
        if isinstance(each, msg.StartGroup) and each.purpose == "evaluate"
    }
    for each in messages(launches(world, HEAD)[-1]):
        if isinstance(each, msg.TrajectoryFinished) and each.group_id in groups:
            yield groups[each.group_id], each


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("run", "versions"),
    [
        pytest.param(RUN, [2, 4], id="split", marks=pytest.mark.slow),
        pytest.param(COLOCATED, [2, 4], id="colocated", marks=pytest.mark.slow),
        pytest.param(AHEAD, [1, 2, 3, 4], id="ahead"),
    ],
)
def test_each_due_version_is_evaluated_once_with_only_its_own_weights(
    run: RunConfig, versions: list[int], seed: int
) -> None:
    world = simulate(run, seed)
    check_the_counts(world)
    evaluations = list_evaluations(world, "step_sampled")
    assert [each.version for each in evaluations] == versions
    assert [each.other_version_tokens for each in evaluations] == [0] * len(versions)
    assert [line.step for line in world.metrics if line.label == "step_sampled"] == versions
    tokens = 0
    for group, answer in iter_answers(world):
        counted = np.frombuffer(answer.record.loss_mask, np.uint8).astype(bool)
        found = set(np.frombuffer(answer.record.versions, np.int32)[counted].tolist())
        first = [each.first_group_id for each in evaluations]
        for version, first_group_id in zip(versions, first, strict=True):
            if first_group_id <= group.group_id < first_group_id + 4:
                assert found == {version}
                tokens += 1
    assert tokens == 4 * len(versions)


@pytest.mark.slow
def test_rollouts_do_not_wait_for_an_evaluation() -> None:
    """The step after an evaluated version is requested with the evaluation, and collects trajectories during it."""
    world = simulate(RUN, 1)
    (launch,) = launches(world, HEAD)
    received = [event for event in launch if event.actor == "buffer"]
    overlapping = 0
    for at, message in enumerate(messages(received)):
        if isinstance(message, msg.EvaluationRequested) and message.label == "step_sampled":
            following = list(messages(received[at + 1 : at + 2]))
            assert following == [msg.StepRequested(message.version + 1, message.version)]
            overlapping += 1
    assert overlapping == 2


FAULTS = Faults(engine_deaths=0.05, learner_deaths=0.05, decider_deaths=0.002, lags=0.01, disasters=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("run", [RUN, COLOCATED, AHEAD], ids=["split", "colocated", "ahead"])
@pytest.mark.parametrize("seed", select_seeds(200, fast=(1, 2), per_change=6))
def test_a_run_with_evaluations_ends_in_spite_of_faults(run: RunConfig, seed: int) -> None:
    world = simulate(run, seed, 0.03, FAULTS)
    evaluations = list_evaluations(world, "step_sampled")
    assert len({each.version for each in evaluations}) == len(evaluations)
    collected = [each for each in messages(world.logs[HEAD].events) if isinstance(each, msg.StepCollected)]
    assert {each.step for each in collected} == set(range(1, run.rl.steps + 1))

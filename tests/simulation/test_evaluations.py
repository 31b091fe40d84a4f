"""Whole runs under a virtual clock, with evaluations during the rollouts."""

from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest

from asterism.bus import messages as msg
from asterism.bus.addresses import HEAD, ROLLOUT
from asterism.configs.schema.schema_tree import replace_keys
from tests.simulation.invariants import check, check_the_counts, launches, messages, select
from tests.simulation.seeds import select_seeds
from tests.simulation.small_run import SMALL
from tests.simulation.world import Faults, World

pytestmark = pytest.mark.slow

RUN = replace_keys(
    SMALL, {"learner.checkpoints.every": 1, "rl.steps": 5, "evaluation.questions": 4, "evaluation.every": 2}
)
RUNS = {
    "split": RUN,
    "colocated": replace_keys(RUN, {"engine.kind": "sglang", "sglang.colocate": True}),
    "ahead": replace_keys(RUN, {"rl.max_staleness": 1, "evaluation.every": 1}),
}
FAULTS = Faults(engine_deaths=0.05, learner_deaths=0.05, decider_deaths=0.002, lags=0.01, disasters=0.01)


@cache
def simulate(name: str, seed: int) -> World:
    world = World(RUNS[name], seed, failure_rate=0.0).play()
    check(world)
    return world


def list_evaluations(world: World, label: str) -> list[msg.EvaluationFinished]:
    events = [event for event in launches(world, HEAD)[-1] if event.actor == "recipe"]
    return [message for message in select(events, msg.EvaluationFinished) if message.label == label]


def iter_answers(world: World) -> Iterator[tuple[msg.StartGroup, msg.TrajectoryFinished]]:
    """Yield the evaluation groups of the last launch with their finished trajectories."""
    started = select(launches(world, ROLLOUT)[-1], msg.StartGroup)
    groups = {each.group_id: each for each in started if each.purpose == "evaluate"}
    for each in select(launches(world, HEAD)[-1], msg.TrajectoryFinished):
        if each.group_id in groups:
            yield groups[each.group_id], each


@pytest.mark.parametrize("seed", select_seeds(40, fast=(1,), per_change=1))
@pytest.mark.parametrize(
    ("name", "versions"),
    [("split", [2, 4]), ("colocated", [2, 4]), ("ahead", [1, 2, 3, 4])],
)
def test_each_due_version_is_evaluated_once_with_only_its_own_weights(
    name: str, versions: list[int], seed: int
) -> None:
    world = simulate(name, seed)
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


def test_rollouts_do_not_wait_for_an_evaluation() -> None:
    """The next training step is requested right after the evaluation is requested."""
    world = simulate("split", 1)
    (launch,) = launches(world, HEAD)
    received = [event for event in launch if event.actor == "buffer"]
    overlapping = 0
    for at, message in enumerate(messages(received)):
        if isinstance(message, msg.EvaluationRequested) and message.label == "step_sampled":
            following = list(messages(received[at + 1 : at + 2]))
            assert following == [msg.StepRequested(message.version + 1, message.version)]
            overlapping += 1
    assert overlapping == 2


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("seed", select_seeds(200, fast=(1, 2), per_change=0))
def test_a_run_with_evaluations_ends_in_spite_of_faults(name: str, seed: int) -> None:
    world = World(RUNS[name], seed, 0.03, FAULTS).play()
    check(world)
    evaluations = list_evaluations(world, "step_sampled")
    assert len({each.version for each in evaluations}) == len(evaluations)
    assert {each.step for each in select(world.logs[HEAD].events, msg.StepCollected)} == set(range(1, RUN.rl.steps + 1))

"""The recipe hands the GPU memory of the engines over to the learner."""

from collections.abc import Sequence

import msgspec
import pytest

from asterism.bus.messages import (
    AnyMessage,
    BufferCursor,
    EngineAsleep,
    EngineJoined,
    EngineLeft,
    EngineSleepRequested,
    GpuMemoryGranted,
    GpuMemoryRequested,
    ProtocolError,
    RunStarted,
    StepRequested,
    WeightsLoaded,
    WeightsPublished,
)
from asterism.policies.decider import Send
from asterism.policies.recipe import Recipe
from asterism.policies.step_evaluations import EvaluationPlan

ENGINES = ("generator-0", "generator-1")


def make_asleep(engine: str, version: int, learner: int = 1, incarnation: int = 1) -> EngineAsleep:
    return EngineAsleep(engine, incarnation, EngineSleepRequested(learner, version))


def decide_all(recipe: Recipe, *events: AnyMessage) -> Sequence[Send]:
    """Return the effects of the last event."""
    effects: Sequence[Send] = ()
    for event in events:
        effects = recipe.decide(0.0, event)
    return effects


def start_recipe() -> Recipe:
    recipe = Recipe(EvaluationPlan(9), ENGINES)
    decide_all(recipe, RunStarted(0, BufferCursor()))
    return recipe


def weights(version: int, incarnation: int = 0) -> WeightsPublished:
    return WeightsPublished(version, "/dev/shm/w", 8, "d", incarnation)


def list_asleep(version: int, incarnation: int = 1) -> list[AnyMessage]:
    return [
        GpuMemoryRequested(incarnation, version),
        *(make_asleep(engine, version, incarnation) for engine in ENGINES),
    ]


def list_loaded(version: int) -> list[AnyMessage]:
    return [weights(version), *(WeightsLoaded(engine, version, 0.1) for engine in ENGINES)]


def grant_memory() -> Recipe:
    """Return a recipe that has granted the memory for step 1."""
    recipe = start_recipe()
    decide_all(recipe, *list_asleep(-1), *list_loaded(0), *list_asleep(1))
    return recipe


def joined(incarnation: int) -> EngineJoined:
    return EngineJoined("generator-1", 64, 16, -1, incarnation)


def test_memory_is_granted_when_every_engine_is_asleep() -> None:
    recipe = start_recipe()
    assert decide_all(recipe, GpuMemoryRequested(1, -1)) == [
        Send(engine, EngineSleepRequested(1, -1)) for engine in ENGINES
    ]
    assert decide_all(recipe, make_asleep("generator-1", -1)) == []
    assert recipe.state.awake_engines == ["generator-0"]
    assert decide_all(recipe, make_asleep("generator-0", -1)) == [Send("learner", GpuMemoryGranted(1, -1))]


def test_new_weights_end_the_handover_and_the_next_step_starts() -> None:
    recipe = start_recipe()
    assert decide_all(recipe, *list_asleep(-1), weights(0)) == [
        Send(engine, weights(0, incarnation=1)) for engine in ENGINES
    ]
    effects = decide_all(recipe, *(WeightsLoaded(engine, 0, 0.1) for engine in ENGINES))
    assert Send("head/buffer", StepRequested(1, 0)) in effects


def test_the_handover_does_not_wait_for_an_engine_that_left() -> None:
    recipe = start_recipe()
    decide_all(recipe, GpuMemoryRequested(1, -1), make_asleep("generator-0", -1))
    assert decide_all(recipe, EngineLeft("generator-1", "killed", 1)) == [Send("learner", GpuMemoryGranted(1, -1))]


def test_an_engine_that_joins_during_a_handover_sleeps_and_receives_only_the_new_weights() -> None:
    recipe = grant_memory()
    decide_all(recipe, EngineLeft("generator-1", "killed", 1))
    assert decide_all(recipe, joined(2)) == [Send("generator-1", EngineSleepRequested(1, 1))]
    assert decide_all(recipe, make_asleep("generator-1", 1, incarnation=2)) == []  # the memory is already granted
    sent = [Send("generator-0", weights(1, incarnation=1)), Send("generator-1", weights(1, incarnation=2))]
    assert decide_all(recipe, weights(1)) == sent


def test_an_expected_engine_is_requested_to_sleep_once() -> None:
    recipe = start_recipe()
    assert decide_all(recipe, GpuMemoryRequested(1, -1), joined(1)) == []
    assert recipe.state.awake_engines == list(ENGINES)


def test_the_handover_waits_for_a_new_incarnation_of_a_sleeping_engine() -> None:
    recipe = start_recipe()
    decide_all(
        recipe, GpuMemoryRequested(1, -1), make_asleep("generator-1", -1), EngineLeft("generator-1", "killed", 1)
    )
    decide_all(recipe, joined(2))
    assert decide_all(recipe, make_asleep("generator-0", -1)) == []
    assert decide_all(recipe, make_asleep("generator-1", -1, incarnation=2)) == [
        Send("learner", GpuMemoryGranted(1, -1))
    ]


def test_a_restarted_learner_requests_memory_again_and_may_repeat_weights() -> None:
    recipe = grant_memory()
    assert decide_all(recipe, GpuMemoryRequested(2, -1)) == [
        Send(engine, EngineSleepRequested(2, -1)) for engine in ENGINES
    ]
    for engine in ENGINES:  # a late answer to the first incarnation's request
        with pytest.raises(ProtocolError):
            decide_all(recipe, make_asleep(engine, -1))
    effects = decide_all(recipe, *(make_asleep(engine, -1, learner=2) for engine in ENGINES))
    assert effects == [Send("learner", GpuMemoryGranted(2, -1))]
    assert decide_all(recipe, weights(0)) == [Send(engine, weights(0, incarnation=1)) for engine in ENGINES]


def test_older_weights_do_not_end_the_handover() -> None:
    recipe = grant_memory()
    assert decide_all(recipe, weights(0)) == []
    assert decide_all(recipe, weights(1)) == [Send(engine, weights(1, incarnation=1)) for engine in ENGINES]


def test_weights_do_not_end_a_handover_that_is_not_granted() -> None:
    recipe = start_recipe()
    assert decide_all(recipe, GpuMemoryRequested(1, -1), weights(0)) == []


@pytest.mark.parametrize(
    "event",
    [
        GpuMemoryRequested(1, 1),
        GpuMemoryRequested(1, 0),
        make_asleep("generator-1", 1, incarnation=2),
        make_asleep("generator-0", -1),
    ],
)
def test_duplicate_and_stale_events_are_refused_and_change_nothing(event: AnyMessage) -> None:
    recipe = grant_memory()
    before = msgspec.json.encode(recipe.state)
    with pytest.raises(ProtocolError):
        recipe.decide(0.0, event)
    assert msgspec.json.encode(recipe.state) == before


def test_without_colocation_the_state_has_no_handover_field() -> None:
    recipe = start_recipe()
    decide_all(recipe, *list_loaded(0))
    assert b"handover" not in msgspec.msgpack.encode(recipe.state)

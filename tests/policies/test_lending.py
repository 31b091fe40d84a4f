"""The recipe hands the GPU memory of the engines over to the learner."""

from collections.abc import Sequence

import msgspec
import pytest

from asterism.bus import messages as msg
from asterism.policies.decider import Send
from asterism.policies.recipe import Recipe
from asterism.policies.step_evaluations import EvaluationPlan

ENGINES = ("generator-0", "generator-1")


def make_asleep(engine: str, version: int, learner: int = 1, incarnation: int = 1) -> msg.EngineAsleep:
    return msg.EngineAsleep(engine, incarnation, msg.EngineSleepRequested(learner, version))


def decide_all(recipe: Recipe, *events: msg.AnyMessage) -> Sequence[Send]:
    """Return the effects of the last event."""
    effects: Sequence[Send] = ()
    for event in events:
        effects = recipe.decide(0.0, event)
    return effects


def start_recipe() -> Recipe:
    recipe = Recipe(EvaluationPlan(9), ENGINES)
    decide_all(recipe, msg.RunStarted(0, msg.BufferCursor()))
    return recipe


def weights(version: int, incarnation: int = 0) -> msg.WeightsPublished:
    return msg.WeightsPublished(version, "/dev/shm/w", 8, "d", incarnation)


def list_asleep(version: int, incarnation: int = 1) -> list[msg.AnyMessage]:
    return [
        msg.GpuMemoryRequested(incarnation, version),
        *(make_asleep(engine, version, incarnation) for engine in ENGINES),
    ]


def list_loaded(version: int) -> list[msg.AnyMessage]:
    return [weights(version), *(msg.WeightsLoaded(engine, version, 0.1) for engine in ENGINES)]


def grant_memory() -> Recipe:
    """Return a recipe that has granted the memory for step 1."""
    recipe = start_recipe()
    decide_all(recipe, *list_asleep(-1), *list_loaded(0), *list_asleep(1))
    return recipe


def joined(incarnation: int) -> msg.EngineJoined:
    return msg.EngineJoined("generator-1", 64, 16, -1, incarnation)


def test_memory_is_granted_when_every_engine_is_asleep() -> None:
    recipe = start_recipe()
    assert decide_all(recipe, msg.GpuMemoryRequested(1, -1)) == [
        Send(engine, msg.EngineSleepRequested(1, -1)) for engine in ENGINES
    ]
    assert decide_all(recipe, make_asleep("generator-1", -1)) == []
    assert recipe.state.awake_engines == ["generator-0"]
    assert decide_all(recipe, make_asleep("generator-0", -1)) == [Send("learner", msg.GpuMemoryGranted(1, -1))]


def test_new_weights_end_the_handover_and_the_next_step_starts() -> None:
    recipe = start_recipe()
    assert decide_all(recipe, *list_asleep(-1), weights(0)) == [
        Send(engine, weights(0, incarnation=1)) for engine in ENGINES
    ]
    effects = decide_all(recipe, *(msg.WeightsLoaded(engine, 0, 0.1) for engine in ENGINES))
    assert Send("head/buffer", msg.StepRequested(1, 0)) in effects


def test_the_handover_does_not_wait_for_an_engine_that_left() -> None:
    recipe = start_recipe()
    decide_all(recipe, msg.GpuMemoryRequested(1, -1), make_asleep("generator-0", -1))
    assert decide_all(recipe, msg.EngineLeft("generator-1", "killed", 1)) == [
        Send("learner", msg.GpuMemoryGranted(1, -1))
    ]


def test_an_engine_that_joins_during_a_handover_sleeps_and_receives_only_the_new_weights() -> None:
    recipe = grant_memory()
    decide_all(recipe, msg.EngineLeft("generator-1", "killed", 1))
    assert decide_all(recipe, joined(2)) == [Send("generator-1", msg.EngineSleepRequested(1, 1))]
    assert decide_all(recipe, make_asleep("generator-1", 1, incarnation=2)) == []  # the memory is already granted
    sent = [Send("generator-0", weights(1, incarnation=1)), Send("generator-1", weights(1, incarnation=2))]
    assert decide_all(recipe, weights(1)) == sent


def test_an_expected_engine_is_requested_to_sleep_once() -> None:
    recipe = start_recipe()
    assert decide_all(recipe, msg.GpuMemoryRequested(1, -1), joined(1)) == []
    assert recipe.state.awake_engines == list(ENGINES)


def test_the_handover_waits_for_a_new_incarnation_of_a_sleeping_engine() -> None:
    recipe = start_recipe()
    decide_all(
        recipe,
        msg.GpuMemoryRequested(1, -1),
        make_asleep("generator-1", -1),
        msg.EngineLeft("generator-1", "killed", 1),
    )
    decide_all(recipe, joined(2))
    assert decide_all(recipe, make_asleep("generator-0", -1)) == []
    assert decide_all(recipe, make_asleep("generator-1", -1, incarnation=2)) == [
        Send("learner", msg.GpuMemoryGranted(1, -1))
    ]


def test_a_restarted_learner_requests_memory_again_and_may_repeat_weights() -> None:
    recipe = grant_memory()
    assert decide_all(recipe, msg.GpuMemoryRequested(2, -1)) == [
        Send(engine, msg.EngineSleepRequested(2, -1)) for engine in ENGINES
    ]
    for engine in ENGINES:  # a late answer to the first incarnation's request
        with pytest.raises(msg.ProtocolError):
            decide_all(recipe, make_asleep(engine, -1))
    effects = decide_all(recipe, *(make_asleep(engine, -1, learner=2) for engine in ENGINES))
    assert effects == [Send("learner", msg.GpuMemoryGranted(2, -1))]
    assert decide_all(recipe, weights(0)) == [Send(engine, weights(0, incarnation=1)) for engine in ENGINES]


def test_older_weights_do_not_end_the_handover() -> None:
    recipe = grant_memory()
    assert decide_all(recipe, weights(0)) == []
    assert decide_all(recipe, weights(1)) == [Send(engine, weights(1, incarnation=1)) for engine in ENGINES]


def test_weights_do_not_end_a_handover_that_is_not_granted() -> None:
    recipe = start_recipe()
    assert decide_all(recipe, msg.GpuMemoryRequested(1, -1), weights(0)) == []


@pytest.mark.parametrize(
    "event",
    [
        msg.GpuMemoryRequested(1, 1),
        msg.GpuMemoryRequested(1, 0),
        make_asleep("generator-1", 1, incarnation=2),
        make_asleep("generator-0", -1),
    ],
)
def test_duplicate_and_stale_events_are_refused_and_change_nothing(event: msg.AnyMessage) -> None:
    recipe = grant_memory()
    before = msgspec.json.encode(recipe.state)
    with pytest.raises(msg.ProtocolError):
        recipe.decide(0.0, event)
    assert msgspec.json.encode(recipe.state) == before


def test_without_colocation_the_state_has_no_handover_field() -> None:
    recipe = start_recipe()
    decide_all(recipe, *list_loaded(0))
    assert b"handover" not in msgspec.msgpack.encode(recipe.state)

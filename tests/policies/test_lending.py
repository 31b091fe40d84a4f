"""The recipe hands the GPU memory of the engines over to the learner."""

import msgspec
import pytest

from asterism.bus import messages as msg
from asterism.policies.decider import Send
from asterism.policies.step_evaluations import EvaluationPlan
from tests.policies.recipes import ENGINES, RecipeDriver, joined, loaded, to_engines, weights


def make_asleep(engine: str, version: int, learner: int = 1, incarnation: int = 1) -> msg.EngineAsleep:
    return msg.EngineAsleep(engine, incarnation, msg.EngineSleepRequested(learner, version))


def list_asleep(version: int, incarnation: int = 1) -> list[msg.AnyMessage]:
    return [
        msg.GpuMemoryRequested(incarnation, version),
        *(make_asleep(engine, version, incarnation) for engine in ENGINES),
    ]


def start_recipe() -> RecipeDriver:
    return RecipeDriver(EvaluationPlan(9))


def grant_memory() -> RecipeDriver:
    """Return a driver whose recipe has granted the memory for step 1."""
    driver = start_recipe()
    driver.decide(*list_asleep(-1))
    driver.publish(0)
    driver.decide(*list_asleep(1))
    return driver


def test_memory_is_granted_when_every_engine_is_asleep() -> None:
    driver = start_recipe()
    assert driver.decide(msg.GpuMemoryRequested(1, -1)) == to_engines(msg.EngineSleepRequested(1, -1))
    assert driver.decide(make_asleep("generator-1", -1)) == []
    assert driver.recipe.state.awake_engines == ["generator-0"]
    assert driver.decide(make_asleep("generator-0", -1)) == [Send("learner", msg.GpuMemoryGranted(1, -1))]


def test_new_weights_end_the_handover_and_the_next_step_starts() -> None:
    driver = start_recipe()
    assert driver.decide(*list_asleep(-1), weights(0)) == to_engines(weights(0, incarnation=1))
    effects = driver.decide(loaded(0, 0), loaded(1, 0))
    assert Send("head/buffer", msg.StepRequested(1, 0)) in effects


def test_the_handover_does_not_wait_for_an_engine_that_left() -> None:
    driver = start_recipe()
    driver.decide(msg.GpuMemoryRequested(1, -1), make_asleep("generator-0", -1))
    assert driver.decide(msg.EngineLeft("generator-1", "killed", 1)) == [Send("learner", msg.GpuMemoryGranted(1, -1))]


def test_an_engine_that_joins_during_a_handover_sleeps_and_receives_only_the_new_weights() -> None:
    driver = grant_memory()
    driver.decide(msg.EngineLeft("generator-1", "killed", 1))
    assert driver.decide(joined(1, 2)) == [Send("generator-1", msg.EngineSleepRequested(1, 1))]
    assert driver.decide(make_asleep("generator-1", 1, incarnation=2)) == []  # the memory is already granted
    sent = [Send("generator-0", weights(1, incarnation=1)), Send("generator-1", weights(1, incarnation=2))]
    assert driver.decide(weights(1)) == sent


def test_an_expected_engine_is_requested_to_sleep_once() -> None:
    driver = start_recipe()
    assert driver.decide(msg.GpuMemoryRequested(1, -1), joined(1, 1)) == []
    assert driver.recipe.state.awake_engines == list(ENGINES)


def test_the_handover_waits_for_a_new_incarnation_of_a_sleeping_engine() -> None:
    driver = start_recipe()
    driver.decide(
        msg.GpuMemoryRequested(1, -1),
        make_asleep("generator-1", -1),
        msg.EngineLeft("generator-1", "killed", 1),
    )
    driver.decide(joined(1, 2))
    assert driver.decide(make_asleep("generator-0", -1)) == []
    assert driver.decide(make_asleep("generator-1", -1, incarnation=2)) == [
        Send("learner", msg.GpuMemoryGranted(1, -1))
    ]


def test_a_restarted_learner_requests_memory_again_and_can_repeat_weights() -> None:
    driver = grant_memory()
    assert driver.decide(msg.GpuMemoryRequested(2, -1)) == to_engines(msg.EngineSleepRequested(2, -1))
    for engine in ENGINES:  # a late answer to the request of the learner's first incarnation
        with pytest.raises(msg.ProtocolError):
            driver.decide(make_asleep(engine, -1))
    effects = driver.decide(*(make_asleep(engine, -1, learner=2) for engine in ENGINES))
    assert effects == [Send("learner", msg.GpuMemoryGranted(2, -1))]
    assert driver.decide(weights(0)) == to_engines(weights(0, incarnation=1))


def test_older_weights_do_not_end_the_handover() -> None:
    driver = grant_memory()
    assert driver.decide(weights(0)) == []
    assert driver.decide(weights(1)) == to_engines(weights(1, incarnation=1))


def test_weights_do_not_end_a_handover_before_the_memory_is_granted() -> None:
    driver = start_recipe()
    assert driver.decide(msg.GpuMemoryRequested(1, -1), weights(0)) == []


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
    driver = grant_memory()
    before = msgspec.json.encode(driver.recipe.state)
    with pytest.raises(msg.ProtocolError):
        driver.decide(event)
    assert msgspec.json.encode(driver.recipe.state) == before


def test_without_colocation_the_state_has_no_handover_field() -> None:
    driver = start_recipe()
    driver.decide(weights(0), loaded(0, 0), loaded(1, 0))
    assert b"handover" not in msgspec.msgpack.encode(driver.recipe.state)

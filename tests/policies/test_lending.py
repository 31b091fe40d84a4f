"""The engines' memory is the learner's while it computes: who is asked, who is waited for, and what ends it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from bus.messages import (
    AnyMessage,
    BufferCursor,
    EngineJoined,
    EngineLeft,
    EngineRested,
    MemoryLent,
    MemoryWanted,
    ProtocolError,
    RestRequested,
    RunStarted,
    StepRequested,
    WeightsLoaded,
    WeightsPublished,
)
from policies.decider import Send
from policies.recipe import Recipe

ENGINES = ("generator-0", "generator-1")


def rested(engine: str, version: int, learner: int = 1, life: int = 1) -> EngineRested:
    return EngineRested(engine, life, RestRequested(learner, version))


def told(made: Recipe, *events: AnyMessage) -> Sequence[Send]:
    """What came of the last of them."""
    effects: Sequence[Send] = ()
    for event in events:
        effects = made.decide(0.0, event)
    return effects


def begun() -> Recipe:
    made = Recipe(9, 0, 1.0, ENGINES)
    told(made, RunStarted(0, BufferCursor()))
    return made


def weights(version: int) -> WeightsPublished:
    return WeightsPublished(version, "/dev/shm/w", 8, "d")


def all_rest(version: int, life: int = 1) -> list[AnyMessage]:
    return [MemoryWanted(life, version), *(rested(engine, version, life) for engine in ENGINES)]


def all_load(version: int) -> list[AnyMessage]:
    return [weights(version), *(WeightsLoaded(engine, version, 0.1) for engine in ENGINES)]


def trained_once() -> Recipe:
    """The learner has the memory for step 1."""
    made = begun()
    told(made, *all_rest(-1), *all_load(0), *all_rest(1))
    return made


def joined(life: int) -> EngineJoined:
    return EngineJoined("generator-1", 64, 16, -1, life)


def test_the_learner_has_it_when_every_engine_has_given_it_back() -> None:
    made = begun()
    assert told(made, MemoryWanted(1, -1)) == [Send(engine, RestRequested(1, -1)) for engine in ENGINES]
    assert told(made, rested("generator-1", -1)) == []
    assert made.state.unrested == ["generator-0"]
    assert told(made, rested("generator-0", -1)) == [Send("learner", MemoryLent(1, -1))]


def test_the_weights_that_follow_go_to_every_engine_and_the_next_step_begins() -> None:
    made = begun()
    assert told(made, *all_rest(-1), weights(0)) == [Send(engine, weights(0)) for engine in ENGINES]
    effects = told(made, *(WeightsLoaded(engine, 0, 0.1) for engine in ENGINES))
    assert Send("head/buffer", StepRequested(1, 0)) in effects


def test_an_engine_that_leaves_is_not_waited_for() -> None:
    made = begun()
    told(made, MemoryWanted(1, -1), rested("generator-0", -1))
    assert told(made, EngineLeft("generator-1", "killed", 1)) == [Send("learner", MemoryLent(1, -1))]


def test_an_engine_that_joins_meanwhile_rests_and_gets_the_weights_of_the_end_alone() -> None:
    made = trained_once()
    told(made, EngineLeft("generator-1", "killed", 1))
    assert told(made, joined(2)) == [Send("generator-1", RestRequested(1, 1))]
    assert told(made, rested("generator-1", 1, life=2)) == []  # it is lent already
    assert told(made, weights(1)) == [Send(engine, weights(1)) for engine in ENGINES]


def test_an_engine_that_is_to_come_is_asked_once() -> None:
    made = begun()
    assert told(made, MemoryWanted(1, -1), joined(1)) == []
    assert made.state.unrested == list(ENGINES)


def test_the_new_life_of_an_engine_is_waited_for_though_the_last_one_had_rested() -> None:
    made = begun()
    told(made, MemoryWanted(1, -1), rested("generator-1", -1), EngineLeft("generator-1", "killed", 1))
    told(made, joined(2))
    assert told(made, rested("generator-0", -1)) == []
    assert told(made, rested("generator-1", -1, life=2)) == [Send("learner", MemoryLent(1, -1))]


def test_a_learner_that_begins_again_asks_everybody_again_and_its_weights_may_be_those_of_before() -> None:
    made = trained_once()
    assert told(made, MemoryWanted(2, -1)) == [Send(engine, RestRequested(2, -1)) for engine in ENGINES]
    for engine in ENGINES:  # of the first life's first request, said late
        with pytest.raises(ProtocolError):
            told(made, rested(engine, -1))
    effects = told(made, *(rested(engine, -1, learner=2) for engine in ENGINES))
    assert effects == [Send("learner", MemoryLent(2, -1))]
    assert told(made, weights(0)) == [Send(engine, weights(0)) for engine in ENGINES]


def test_weights_of_before_the_loan_do_not_end_it() -> None:
    made = trained_once()
    assert told(made, weights(0)) == []
    assert told(made, weights(1)) == [Send(engine, weights(1)) for engine in ENGINES]


def test_weights_do_not_end_what_is_only_asked_for() -> None:
    made = begun()
    assert told(made, MemoryWanted(1, -1), weights(0)) == []


@pytest.mark.parametrize(
    "event",
    [MemoryWanted(1, 1), MemoryWanted(1, 0), rested("generator-1", 1, life=2), rested("generator-0", -1)],
)
def test_what_comes_twice_or_of_another_life_is_refused_and_changes_nothing(event: AnyMessage) -> None:
    made = trained_once()
    before = msgspec.json.encode(made.state)
    with pytest.raises(ProtocolError):
        made.decide(0.0, event)
    assert msgspec.json.encode(made.state) == before


def test_where_nothing_is_asked_for_the_state_is_as_if_nothing_could_be() -> None:
    made = begun()
    told(made, *all_load(0))
    assert b"loan" not in msgspec.msgpack.encode(made.state)

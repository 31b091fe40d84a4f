"""The order of a run."""

from __future__ import annotations

import pytest

from bus.messages import (
    AnyMessage,
    BufferCursor,
    EvaluationFinished,
    EvaluationRequested,
    MetricsRecorded,
    ProtocolError,
    RunFinished,
    RunStarted,
    StepCollected,
    StepCounts,
    StepRequested,
    StepTrained,
    WeightsLoaded,
    WeightsPublished,
)
from policies.accounting import Recorder, counted
from policies.recipe import Recipe
from tests.policies.groups import finished

ENGINES = ("generator-0", "generator-1")


def recipe(steps: int = 2, questions: int = 5) -> Recipe:
    made = Recipe(steps, questions, 1.0, ENGINES)
    made.decide(0.0, RunStarted(0, BufferCursor()))
    return made


def weights(version: int) -> WeightsPublished:
    return WeightsPublished(version, "/dev/shm/w", 8, "d")


def all_load(made: Recipe, version: int) -> list[AnyMessage]:
    made.decide(0.0, weights(version))
    effects = [effect for engine in ENGINES for effect in made.decide(0.0, WeightsLoaded(engine, version, 0.1))]
    return [effect.message for effect in effects if effect.to in ("head/buffer", "launcher")]


def test_new_weights_go_to_every_engine() -> None:
    effects = recipe().decide(0.0, weights(0))
    assert [effect.to for effect in effects] == list(ENGINES)


def test_a_step_begins_only_when_every_engine_holds_the_weights() -> None:
    made = recipe(questions=0)
    made.decide(0.0, weights(0))
    assert not [e for e in made.decide(0.0, WeightsLoaded("generator-0", 0, 0.1)) if e.to == "head/buffer"]
    last = made.decide(0.0, WeightsLoaded("generator-1", 0, 0.1))
    assert StepRequested(1, 0) in [effect.message for effect in last]


def test_a_run_is_evaluate_step_step_evaluate() -> None:
    made = recipe()
    assert all_load(made, 0) == [EvaluationRequested("start_sampled", 1.0, 5, 0)]
    (effect,) = made.decide(0.0, EvaluationFinished("start_sampled", 5, 1, 0, 9))
    assert effect.message == EvaluationRequested("start_greedy", 0.0, 5, 0)
    messages = [e.message for e in made.decide(0.0, EvaluationFinished("start_greedy", 5, 1, 0, 9))]
    assert messages == [StepRequested(1, 0), StepRequested(1, 0)]  # recorder and buffer
    assert all_load(made, 1) == [StepRequested(2, 1)]
    assert all_load(made, 2) == [EvaluationRequested("end_sampled", 1.0, 5, 2)]
    made.decide(0.0, EvaluationFinished("end_sampled", 5, 1, 0, 9))
    (effect,) = made.decide(0.0, EvaluationFinished("end_greedy", 5, 1, 0, 9))
    assert (effect.to, effect.message) == ("launcher", RunFinished(2))


def test_a_resumed_run_goes_on_without_the_first_evaluation() -> None:
    assert all_load(recipe(steps=9), 4) == [StepRequested(5, 4)]


def test_a_run_without_steps_is_its_evaluations() -> None:
    made = recipe(steps=0, questions=0)
    assert all_load(made, 0) == [RunFinished(0)]


@pytest.mark.parametrize(
    "event",
    [
        WeightsLoaded("generator-0", 7, 0.1),
        WeightsLoaded("generator-0", 0, 0.1),
        weights(0),
        EvaluationFinished("end_greedy", 1, 1, 0, 1),
    ],
)
def test_what_nobody_waits_for_is_refused(event: AnyMessage) -> None:
    made = recipe()
    made.decide(0.0, weights(0))
    made.decide(0.0, WeightsLoaded("generator-0", 0, 0.1))
    before = made.state_after(event)
    with pytest.raises(ProtocolError):
        made.decide(0.0, event)
    assert made.state_after(event) == before


def test_a_steps_phases_add_up_to_its_time() -> None:
    recorder = Recorder(steps=5, num_engines=2)
    counts = counted(StepCounts(groups=1), finished(0, 1.0, calls=2, failed=1))
    recorder.decide(10.0, StepRequested(1, 0))
    recorder.decide(14.0, StepCollected(1, 1, counts, {"sandbox: gone": 2}, BufferCursor()))
    recorder.decide(15.5, StepTrained(1, {"loss": 0.5}))
    assert not recorder.decide(15.6, WeightsLoaded("generator-0", 1, 0.1))
    line = recorder.decide(15.75, WeightsLoaded("generator-1", 1, 0.1))[0].message
    assert isinstance(line, MetricsRecorded)
    values = line.values
    assert values["rollout_s"] + values["train_s"] + values["weights_s"] == pytest.approx(values["step_s"]) == 5.75
    assert values["errors_in_positives"] == 0.5
    assert values["tokens_per_s"] == 2 / 4.0
    assert values["failed: sandbox: gone"] == 2
    assert values["loss"] == 0.5


def test_an_evaluations_accuracy_leaves_out_what_infrastructure_lost() -> None:
    recorder = Recorder(steps=5, num_engines=1)
    line = recorder.decide(0.0, EvaluationFinished("start_greedy", 10, 4, 2, 80))[0].message
    assert isinstance(line, MetricsRecorded)
    assert line.values["accuracy"] == 0.5
    assert line.values["response_tokens"] == 10.0

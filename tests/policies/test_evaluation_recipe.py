"""The recipe of a run that only evaluates: one evaluation, then the end."""

import pytest

from asterism.bus.addresses import BUFFER
from asterism.bus.messages import (
    BufferCursor,
    EngineLeft,
    EvaluationFinished,
    EvaluationRequested,
    ProtocolError,
    RunFinished,
    RunStarted,
    StepRequested,
)
from asterism.configs.algorithm import EvaluationConfig, SamplingConfig
from asterism.configs.schema import RunConfig
from asterism.policies.decider import Send
from asterism.policies.evaluation_recipe import EvaluationRecipe

STARTED = RunStarted(0, BufferCursor())


def recipe(options: EvaluationConfig) -> EvaluationRecipe:
    return EvaluationRecipe(RunConfig(name="test", sampling=SamplingConfig(temperature=0.6), evaluation=options))


@pytest.mark.parametrize(
    ("options", "request_"),
    [
        (EvaluationConfig(7), EvaluationRequested("sampled", 0.6, 7, 0)),
        (EvaluationConfig(7, temperature=0.9, top_p=0.8), EvaluationRequested("sampled", 0.9, 7, 0, 0.8)),
        (EvaluationConfig(7, during="greedy", top_p=0.8), EvaluationRequested("greedy", 0.0, 7, 0)),
    ],
)
def test_the_run_evaluates_once_and_ends(options: EvaluationConfig, request_: EvaluationRequested) -> None:
    decider = recipe(options)
    assert decider.decide(0.0, STARTED) == [Send(BUFFER, request_)]
    assert decider.decide(0.0, EngineLeft("generator-0", "killed", 1)) == []
    assert decider.decide(0.0, EvaluationFinished(request_.label, 7, 1, 0, 9)) == [Send(BUFFER, RunFinished(0))]


def test_a_second_end_and_a_training_step_are_refused() -> None:
    decider = recipe(EvaluationConfig(7))
    decider.decide(0.0, STARTED)
    decider.decide(0.0, EvaluationFinished("sampled", 7, 1, 0, 9))
    for event in (EvaluationFinished("sampled", 7, 1, 0, 9), StepRequested(1, 0)):
        with pytest.raises(ProtocolError, match="does not accept"):
            decider.decide(0.0, event)

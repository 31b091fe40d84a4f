"""The recipe of a run that only evaluates: one evaluation, then the end."""

import pytest

from asterism.bus import messages as msg
from asterism.bus.addresses import BUFFER
from asterism.configs.schema.algorithm import GREEDY, EvaluationConfig, Sampling
from asterism.configs.schema.run_config import RunConfig
from asterism.policies.decider import Send
from asterism.policies.evaluation_recipe import EvaluationRecipe
from tests.fakes import evaluated

TRUNCATED = Sampling(temperature=0.9, top_p=0.8)
STARTED = msg.RunStarted(0, msg.BufferCursor())


def recipe(options: EvaluationConfig) -> EvaluationRecipe:
    return EvaluationRecipe(RunConfig(name="test", sampling=Sampling(temperature=0.6), evaluation=options))


@pytest.mark.parametrize(
    ("options", "request_"),
    [
        (EvaluationConfig(7), msg.EvaluationRequested("sampled", Sampling(temperature=0.6), 7, 0)),
        (EvaluationConfig(7, sampling=TRUNCATED), msg.EvaluationRequested("sampled", TRUNCATED, 7, 0)),
        (EvaluationConfig(7, during="greedy", sampling=TRUNCATED), msg.EvaluationRequested("greedy", GREEDY, 7, 0)),
    ],
)
def test_the_run_evaluates_once_and_ends(options: EvaluationConfig, request_: msg.EvaluationRequested) -> None:
    decider = recipe(options)
    assert decider.decide(0.0, STARTED) == [Send(BUFFER, request_)]
    assert decider.decide(0.0, msg.EngineLeft("generator-0", "killed", 1)) == []
    assert decider.decide(0.0, evaluated(request_.label)) == [Send(BUFFER, msg.RunFinished(0))]


def test_a_second_end_and_a_training_step_are_refused() -> None:
    decider = recipe(EvaluationConfig(7))
    decider.decide(0.0, STARTED)
    decider.decide(0.0, evaluated("sampled"))
    for event in (evaluated("sampled"), msg.StepRequested(1, 0)):
        with pytest.raises(msg.ProtocolError, match="does not accept"):
            decider.decide(0.0, event)

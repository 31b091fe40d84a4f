"""Orders a run that only evaluates (`asterism eval`): one evaluation of the weights of model.checkpoint.

    RunStarted --> EvaluationRequested to the buffer --> EvaluationFinished --> RunFinished

The engines start with these weights, as version EVALUATED_VERSION, and join only the arbiter: no learner publishes
weights. Trajectories wait for their first lease until an engine has joined.
"""

from collections.abc import Sequence

import msgspec

from asterism.bus.addresses import BUFFER
from asterism.bus.messages import AnyMessage, EngineLeft, EvaluationFinished, ProtocolError, RunFinished, RunStarted
from asterism.configs.schema.run_config import RunConfig
from asterism.policies.decider import Send
from asterism.policies.step_evaluations import EvaluationPlan

EVALUATED_VERSION = 0  # version of the weights in messages


class EvaluationRecipeState(msgspec.Struct):
    pending_label: str = ""  # label of the evaluation in flight


class EvaluationRecipe:
    """A decider (asterism.policies.decider.Decider) that replaces asterism.policies.recipe.Recipe."""

    def __init__(self, run: RunConfig) -> None:
        self._plan = EvaluationPlan.from_config(run)
        self._label = run.evaluation.during
        self.state = EvaluationRecipeState()

    def decide(self, now: float, event: AnyMessage) -> Sequence[Send]:
        match event:
            case RunStarted():
                self.state = EvaluationRecipeState(self._label)
                return [Send(BUFFER, self._plan.build_request(self._label, EVALUATED_VERSION))]
            case EvaluationFinished(label=label) if label == self.state.pending_label:
                self.state = EvaluationRecipeState()
                return [Send(BUFFER, RunFinished(EVALUATED_VERSION))]
            case EngineLeft():  # the arbiter and the rollouts handle it
                return []
            case _:
                raise ProtocolError(f"the recipe of an evaluation does not accept {type(event).__name__}")

    def get_state_after(self, event: AnyMessage) -> msgspec.Struct | None:
        return self.state

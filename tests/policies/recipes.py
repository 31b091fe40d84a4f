"""A driver of the recipe, and the messages of the learner and of two engines."""

from asterism.bus import messages as msg
from asterism.bus.addresses import BUFFER, LAUNCHER
from asterism.configs.schema.algorithm import EarlyStoppingConfig
from asterism.policies.decider import Send
from asterism.policies.recipe import Recipe
from asterism.policies.step_evaluations import EvaluationPlan

ENGINES = ("generator-0", "generator-1")
STARTED = msg.RunStarted(0, msg.BufferCursor())


def weights(version: int, incarnation: int = 0) -> msg.WeightsPublished:
    return msg.WeightsPublished(version, "/dev/shm/w", 8, "d", incarnation)


def loaded(number: int, version: int, incarnation: int = 1) -> msg.WeightsLoaded:
    return msg.WeightsLoaded(f"generator-{number}", version, 0.1, incarnation)


def joined(number: int, incarnation: int) -> msg.EngineJoined:
    return msg.EngineJoined(f"generator-{number}", 1024, 16, version=-1, incarnation=incarnation)


def to_engines(message: msg.AnyMessage) -> list[Send]:
    return [Send(engine, message) for engine in ENGINES]


class RecipeDriver:
    """A recipe with two engines after the start of its run."""

    def __init__(
        self,
        plan: EvaluationPlan,
        max_staleness: int = 0,
        early_stopping: EarlyStoppingConfig | None = None,
        started: msg.RunStarted = STARTED,
    ) -> None:
        self.recipe = Recipe(plan, ENGINES, max_staleness, early_stopping)
        self.decide(started)

    def decide(self, *events: msg.AnyMessage) -> list[Send]:
        """Decide the events, and return the effects of the last one."""
        return [list(self.recipe.decide(0.0, event)) for event in events][-1]

    def load(self, version: int) -> list[msg.AnyMessage]:
        """Let all engines load the version; return the requests to the buffer and the launcher."""
        sent = [send for number in range(len(ENGINES)) for send in self.decide(loaded(number, version))]
        return [send.message for send in sent if send.to in (BUFFER, LAUNCHER)]

    def publish(self, version: int) -> list[msg.AnyMessage]:
        """Publish a version, and let all engines load it."""
        self.decide(weights(version))
        return self.load(version)

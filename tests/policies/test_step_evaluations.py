"""Evaluations during training: the recipe holds newer weights back until they end."""

import pytest
from msgspec.structs import replace

from asterism.bus import messages as msg
from asterism.configs.schema.algorithm import GREEDY, EvaluationConfig, RlConfig, Sampling
from asterism.configs.schema.run_config import RunConfig
from asterism.policies.recipe import Recipe
from asterism.policies.step_evaluations import EvaluationPlan
from tests.fakes import evaluated

ENGINES = ("generator-0", "generator-1")
PLAN = EvaluationPlan(steps=9, questions=5, intervals=(2,))
BUFFER = "head/buffer"
TRUNCATED = Sampling(temperature=0.6, top_p=0.9, top_k=20)


class RecipeDriver:
    """A recipe after the evaluations at the start."""

    def __init__(self, plan: EvaluationPlan = PLAN, max_staleness: int = 0, first_step: int = 1) -> None:
        self.recipe = Recipe(plan, ENGINES, max_staleness)
        self.decide(msg.RunStarted(first_step, msg.BufferCursor()))

    def decide(self, event: msg.AnyMessage) -> list[tuple[str, msg.AnyMessage]]:
        return [(send.to, send.message) for send in self.recipe.decide(0.0, event)]

    def publish(self, version: int) -> list[str]:
        """The engines that get the version, as announced."""
        sent = self.decide(weights(version))
        assert all(isinstance(message, msg.WeightsPublished) for _, message in sent)
        return [to for to, message in sent if message == weights(version, 1)]

    def load(self, version: int) -> list[msg.AnyMessage]:
        """The requests to the buffer once all engines have loaded the version."""
        sent = [each for engine in ENGINES for each in self.decide(msg.WeightsLoaded(engine, version, 0.1))]
        return [message for to, message in sent if to == BUFFER]

    def end_evaluation(self, version: int, label: str = "step_sampled") -> list[tuple[str, msg.AnyMessage]]:
        return self.decide(evaluated(label, version))


def weights(version: int, incarnation: int = 0) -> msg.WeightsPublished:
    return msg.WeightsPublished(version, "/dev/shm/w", 8, "d", incarnation)


def evaluation(version: int) -> msg.EvaluationRequested:
    return msg.EvaluationRequested("step_sampled", Sampling(), 5, version)


def test_an_evaluation_is_requested_every_n_steps_together_with_the_next_step() -> None:
    driver = RecipeDriver()
    assert driver.publish(1) == [*ENGINES]
    assert driver.load(1) == [msg.StepRequested(2, 1)]
    driver.publish(2)
    assert driver.load(2) == [evaluation(2), msg.StepRequested(3, 2)]


def test_newer_weights_wait_for_the_end_of_the_evaluation() -> None:
    driver = RecipeDriver(first_step=2)
    driver.publish(2)
    driver.load(2)
    assert driver.publish(3) == []
    assert driver.end_evaluation(2) == [(engine, weights(3, 1)) for engine in ENGINES]
    assert driver.load(3) == [msg.StepRequested(4, 3)]


def test_an_evaluation_that_ends_before_the_training_delays_nothing() -> None:
    driver = RecipeDriver(first_step=2)
    driver.publish(2)
    driver.load(2)
    assert driver.end_evaluation(2) == []
    assert driver.publish(3) == [*ENGINES]


def test_an_engine_that_joins_meanwhile_gets_the_weights_under_evaluation() -> None:
    driver = RecipeDriver(first_step=2)
    driver.publish(2)
    driver.load(2)
    driver.publish(3)
    driver.decide(msg.EngineLeft("generator-1", "killed", 1))
    joined = msg.EngineJoined("generator-1", 1024, 16, version=-1, incarnation=2)
    assert driver.decide(joined) == [("generator-1", weights(2, 2))]
    assert driver.end_evaluation(2) == [("generator-0", weights(3, 1)), ("generator-1", weights(3, 2))]


def test_the_newest_weights_are_sent_if_no_engine_has_the_weights_under_evaluation() -> None:
    driver = RecipeDriver(first_step=2)
    driver.publish(2)
    driver.load(2)
    driver.publish(3)
    for engine in ENGINES:
        driver.decide(msg.EngineLeft(engine, "killed", 1))
    joined = msg.EngineJoined("generator-1", 1024, 16, version=-1, incarnation=2)
    assert driver.decide(joined) == [("generator-1", weights(3, 2))]
    sent = driver.decide(msg.WeightsLoaded("generator-1", 3, 0.1, incarnation=2))
    assert (BUFFER, msg.StepRequested(4, 3)) in sent
    driver.decide(weights(4))
    assert driver.decide(msg.WeightsLoaded("generator-1", 4, 0.1, incarnation=2))[-1] == (
        BUFFER,
        msg.StepRequested(5, 4),
    )
    assert driver.end_evaluation(2) == [(BUFFER, evaluation(4))]


def test_with_staleness_each_due_version_is_loaded_and_evaluated_in_turn() -> None:
    driver = RecipeDriver(PLAN._replace(intervals=(1,)), max_staleness=1)
    driver.publish(1)
    assert driver.load(1) == [evaluation(1), msg.StepRequested(2, 1), msg.StepRequested(3, 1)]
    assert driver.publish(2) == driver.publish(3) == []
    assert driver.end_evaluation(1) == [(engine, weights(2, 1)) for engine in ENGINES]
    assert driver.load(2) == [evaluation(2), msg.StepRequested(4, 2)]
    assert driver.end_evaluation(2) == [(engine, weights(3, 1)) for engine in ENGINES]


def test_a_restarted_learner_skips_evaluations_that_have_not_begun() -> None:
    driver = RecipeDriver(PLAN._replace(intervals=(1,)), max_staleness=1)
    driver.decide(msg.StepTrained(1, {}))
    driver.publish(1)
    driver.load(1)
    for version in (2, 3):
        driver.decide(msg.StepTrained(version, {}))
        driver.publish(version)
    driver.decide(msg.StepTrained(1, {}))
    assert driver.publish(3) == []
    assert driver.end_evaluation(1) == [(engine, weights(3, 1)) for engine in ENGINES]
    assert driver.load(3)[0] == evaluation(3)


def test_weights_under_evaluation_that_are_published_again_are_not_evaluated_again() -> None:
    driver = RecipeDriver(first_step=2)
    driver.publish(2)
    driver.load(2)
    again = replace(weights(2), path="/dev/shm/elsewhere")
    assert driver.decide(again) == []
    driver.end_evaluation(2)
    assert driver.decide(again) == []
    assert driver.publish(3) == [*ENGINES]


def test_engines_keep_their_memory_until_the_evaluation_ends() -> None:
    driver = RecipeDriver(first_step=2)
    driver.publish(2)
    driver.load(2)
    assert driver.decide(msg.GpuMemoryRequested(1, 3)) == []
    request = msg.EngineSleepRequested(1, 3)
    assert driver.end_evaluation(2) == [(engine, request) for engine in ENGINES]
    driver.decide(msg.EngineAsleep("generator-0", 1, request))
    assert driver.decide(msg.EngineAsleep("generator-1", 1, request)) == [("learner", msg.GpuMemoryGranted(1, 3))]
    assert driver.publish(3) == [*ENGINES]


def test_the_evaluations_at_the_end_follow_without_one_alongside() -> None:
    driver = RecipeDriver(EvaluationPlan(steps=4, questions=5, intervals=(2,)), first_step=3)
    driver.publish(3)
    assert driver.load(3) == [msg.StepRequested(4, 3)]
    driver.publish(4)
    assert driver.load(4) == [msg.EvaluationRequested("end_sampled", Sampling(), 5, 4)]
    driver.end_evaluation(4, "end_sampled")
    assert driver.end_evaluation(4, "end_greedy") == [(BUFFER, msg.RunFinished(4))]


def test_an_evaluation_that_was_not_requested_is_refused() -> None:
    driver = RecipeDriver()
    driver.publish(1)
    driver.load(1)
    with pytest.raises(msg.ProtocolError, match="evaluation step_sampled was not requested"):
        driver.end_evaluation(1)


@pytest.mark.parametrize(
    ("during", "request_"),
    [
        ("sampled", msg.EvaluationRequested("step_sampled", TRUNCATED, 7, 2)),
        ("greedy", msg.EvaluationRequested("step_greedy", GREEDY, 7, 2)),
    ],
)
def test_only_sampled_evaluations_have_the_sampling_of_the_configuration(
    during: str, request_: msg.EvaluationRequested
) -> None:
    options = EvaluationConfig(questions=7, every=2, during=during, sampling=TRUNCATED)  # pyright: ignore[reportArgumentType]
    plan = EvaluationPlan.from_config(RunConfig(name="a", evaluation=options))
    assert plan.build_request(plan.step_label, 2) == request_


def test_an_evaluation_has_the_sampling_of_a_run_that_does_not_train() -> None:
    run = RunConfig(name="a", sampling=TRUNCATED, rl=RlConfig(steps=0))
    assert EvaluationPlan.from_config(run).sampling == TRUNCATED

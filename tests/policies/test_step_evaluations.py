"""During an evaluation, the recipe does not send newer weights to the engines."""

import pytest
from msgspec.structs import replace

from asterism.bus import messages as msg
from asterism.bus.addresses import BUFFER
from asterism.configs.schema.algorithm import GREEDY, EvaluationConfig, RlConfig, Sampling
from asterism.configs.schema.run_config import RunConfig
from asterism.policies.decider import Send
from asterism.policies.step_evaluations import EvaluationPlan
from tests.fakes import evaluated
from tests.policies.recipes import ENGINES, RecipeDriver, joined, loaded, to_engines, weights

PLAN = EvaluationPlan(steps=9, questions=5, intervals=(2,))
TRUNCATED = Sampling(temperature=0.6, top_p=0.9, top_k=20)


class EvaluationDriver(RecipeDriver):
    """A driver of a recipe that has finished its evaluations at the start."""

    def __init__(self, plan: EvaluationPlan = PLAN, max_staleness: int = 0, first_step: int = 1) -> None:
        super().__init__(plan, max_staleness, started=msg.RunStarted(first_step, msg.BufferCursor()))

    def announce(self, version: int) -> list[str]:
        """Publish a version, and return the engines to which the recipe forwards it."""
        sent = self.decide(weights(version))
        assert all(isinstance(send.message, msg.WeightsPublished) for send in sent)
        return [send.to for send in sent if send.message == weights(version, 1)]

    def end_evaluation(self, version: int, label: str = "step_sampled") -> list[Send]:
        return self.decide(evaluated(label, version))


def start_evaluation() -> EvaluationDriver:
    """Return a driver during the evaluation of version 2."""
    driver = EvaluationDriver(first_step=2)
    driver.publish(2)
    return driver


def evaluation(version: int) -> msg.EvaluationRequested:
    return msg.EvaluationRequested("step_sampled", Sampling(), 5, version)


def test_an_evaluation_is_requested_every_n_steps_together_with_the_next_step() -> None:
    driver = EvaluationDriver()
    assert driver.announce(1) == [*ENGINES]
    assert driver.load(1) == [msg.StepRequested(2, 1)]
    assert driver.publish(2) == [evaluation(2), msg.StepRequested(3, 2)]


def test_newer_weights_wait_for_the_end_of_the_evaluation() -> None:
    driver = start_evaluation()
    assert driver.announce(3) == []
    assert driver.end_evaluation(2) == to_engines(weights(3, 1))
    assert driver.load(3) == [msg.StepRequested(4, 3)]


def test_an_evaluation_that_ends_before_the_training_delays_nothing() -> None:
    driver = start_evaluation()
    assert driver.end_evaluation(2) == []
    assert driver.announce(3) == [*ENGINES]


def test_an_engine_that_joins_during_an_evaluation_gets_the_evaluated_weights() -> None:
    driver = start_evaluation()
    driver.announce(3)
    driver.decide(msg.EngineLeft("generator-1", "killed", 1))
    assert driver.decide(joined(1, 2)) == [Send("generator-1", weights(2, 2))]
    assert driver.end_evaluation(2) == [Send("generator-0", weights(3, 1)), Send("generator-1", weights(3, 2))]


def test_the_newest_weights_are_sent_if_no_engine_has_the_weights_under_evaluation() -> None:
    driver = start_evaluation()
    driver.announce(3)
    for engine in ENGINES:
        driver.decide(msg.EngineLeft(engine, "killed", 1))
    assert driver.decide(joined(1, 2)) == [Send("generator-1", weights(3, 2))]
    sent = driver.decide(loaded(1, 3, 2))
    assert Send(BUFFER, msg.StepRequested(4, 3)) in sent
    driver.decide(weights(4))
    assert driver.decide(loaded(1, 4, 2))[-1] == Send(BUFFER, msg.StepRequested(5, 4))
    assert driver.end_evaluation(2) == [Send(BUFFER, evaluation(4))]


def test_with_staleness_each_due_version_is_loaded_and_evaluated_in_turn() -> None:
    driver = EvaluationDriver(PLAN._replace(intervals=(1,)), max_staleness=1)
    assert driver.publish(1) == [evaluation(1), msg.StepRequested(2, 1), msg.StepRequested(3, 1)]
    assert driver.announce(2) == driver.announce(3) == []
    assert driver.end_evaluation(1) == to_engines(weights(2, 1))
    assert driver.load(2) == [evaluation(2), msg.StepRequested(4, 2)]
    assert driver.end_evaluation(2) == to_engines(weights(3, 1))


def test_a_restarted_learner_skips_evaluations_that_have_not_begun() -> None:
    driver = EvaluationDriver(PLAN._replace(intervals=(1,)), max_staleness=1)
    driver.decide(msg.StepTrained(1, {}))
    driver.publish(1)
    for version in (2, 3):
        driver.decide(msg.StepTrained(version, {}))
        driver.announce(version)
    driver.decide(msg.StepTrained(1, {}))
    assert driver.announce(3) == []
    assert driver.end_evaluation(1) == to_engines(weights(3, 1))
    assert driver.load(3)[0] == evaluation(3)


def test_weights_under_evaluation_that_are_published_again_are_not_evaluated_again() -> None:
    driver = start_evaluation()
    again = replace(weights(2), path="/dev/shm/elsewhere")
    assert driver.decide(again) == []
    driver.end_evaluation(2)
    assert driver.decide(again) == []
    assert driver.announce(3) == [*ENGINES]


def test_engines_keep_their_memory_until_the_evaluation_ends() -> None:
    driver = start_evaluation()
    assert driver.decide(msg.GpuMemoryRequested(1, 3)) == []
    request = msg.EngineSleepRequested(1, 3)
    assert driver.end_evaluation(2) == to_engines(request)
    driver.decide(msg.EngineAsleep("generator-0", 1, request))
    assert driver.decide(msg.EngineAsleep("generator-1", 1, request)) == [Send("learner", msg.GpuMemoryGranted(1, 3))]
    assert driver.announce(3) == [*ENGINES]


def test_the_last_step_has_only_the_evaluations_at_the_end() -> None:
    driver = EvaluationDriver(EvaluationPlan(steps=4, questions=5, intervals=(2,)), first_step=3)
    assert driver.publish(3) == [msg.StepRequested(4, 3)]
    assert driver.publish(4) == [msg.EvaluationRequested("end_sampled", Sampling(), 5, 4)]
    driver.end_evaluation(4, "end_sampled")
    assert driver.end_evaluation(4, "end_greedy") == [Send(BUFFER, msg.RunFinished(4))]


def test_an_evaluation_that_was_not_requested_is_refused() -> None:
    driver = EvaluationDriver()
    driver.publish(1)
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


def test_an_evaluation_has_the_runs_sampling_if_the_run_does_not_train() -> None:
    run = RunConfig(name="a", sampling=TRUNCATED, rl=RlConfig(steps=0))
    assert EvaluationPlan.from_config(run).sampling == TRUNCATED

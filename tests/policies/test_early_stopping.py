"""The rules of early stopping, and runs that end because a rule holds."""

import pytest

from asterism.bus import messages as msg
from asterism.configs.schema.algorithm import EarlyStoppingConfig, Sampling
from asterism.policies.early_stopping import EarlyStopping, describe_outcome
from asterism.policies.step_evaluations import EvaluationPlan
from tests.policies.recipes import RecipeDriver

PLATEAU = EarlyStoppingConfig(window_steps=2, min_reward_gain=0.1)
OVERLONG = EarlyStoppingConfig(window_steps=2, max_overlong_share=0.5, min_steps=4)
RISING_THEN_FLAT = (0.1, 0.2, 0.4, 0.5, 0.52, 0.53, 0.9)


def outcomes(rewards: tuple[float, ...], overlong: float = 0.0) -> list[msg.StepOutcome]:
    return [msg.StepOutcome(step, reward, overlong) for step, reward in enumerate(rewards, 1)]


def find_step(options: EarlyStoppingConfig, steps: list[msg.StepOutcome]) -> tuple[int, str]:
    rules = EarlyStopping()
    return next(((each.step, cause) for each in steps if (cause := rules.record(each, options))), (0, ""))


def test_a_plateau_of_the_reward_is_found_at_the_end_of_its_window() -> None:
    # The mean reward is 0.525 in the window that ends at step 6, and 0.45 in the previous window.
    cause = "the reward changes by +0.0750 (early_stopping.min_reward_gain)"
    assert find_step(PLATEAU, outcomes(RISING_THEN_FLAT)) == (6, cause)


def test_the_share_at_the_length_limit_counts_only_after_min_steps() -> None:
    step, cause = find_step(OVERLONG, outcomes((0.1,) * 6, overlong=0.6))
    assert step == 4
    assert "ends 60.0% of the responses" in cause
    assert find_step(OVERLONG, outcomes((0.1,) * 6, overlong=0.4)) == (0, "")


def test_an_outcome_has_means_over_the_finished_trajectories() -> None:
    counts = msg.StepCounts(
        msg.TaskCounts(trajectories=8, trajectories_failed=2, reward=2.0), endings={"length": 4, "answered": 4}
    )
    collected = msg.StepCollected(3, 4, counts, {}, msg.BufferCursor())
    assert describe_outcome(collected) == msg.StepOutcome(3, 0.25, 0.5)
    empty = msg.StepCollected(3, 0, msg.StepCounts(), {}, msg.BufferCursor())
    assert describe_outcome(empty) == msg.StepOutcome(3, 0.0, 0.0)


class Run(RecipeDriver):
    """A driver of a recipe with a stopping rule; its steps have given rewards."""

    def __init__(self, *earlier: msg.StepOutcome, max_staleness: int = 0, questions: int = 0, steps: int = 20) -> None:
        started = msg.RunStarted(len(earlier), msg.BufferCursor(), earlier_steps=earlier)
        super().__init__(EvaluationPlan(steps, questions), max_staleness, PLATEAU, started)

    def collect(self, step: int, reward: float) -> list[object]:
        counts = msg.StepCounts(msg.TaskCounts(trajectories=10, reward=10 * reward))
        return [send.message for send in self.decide(msg.StepCollected(step, 1, counts, {}, msg.BufferCursor()))]


def train_until_a_rule_holds(run: Run) -> int:
    """Train until a rule holds, and return the number of the last trained step."""
    for step, reward in enumerate(RISING_THEN_FLAT, 1):
        if run.collect(step, reward):
            return step
        run.publish(step)
    raise AssertionError("no rule held")


def test_the_step_after_the_rule_is_the_last() -> None:
    run = Run()
    run.publish(0)
    assert train_until_a_rule_holds(run) == 6
    assert run.publish(6) == [msg.StepRequested(7, 6, is_last=True)]
    assert run.collect(7, 0.9) == []  # a run decides only once to stop
    assert run.publish(7) == [msg.RunFinished(7)]


def test_the_launcher_receives_the_rule_and_the_last_step() -> None:
    run = Run()
    run.publish(0)
    for step, reward in enumerate(RISING_THEN_FLAT[:5], 1):
        run.collect(step, reward)
        run.publish(step)
    (decided,) = run.collect(6, RISING_THEN_FLAT[5])
    assert isinstance(decided, msg.EarlyStopDecided)
    assert (decided.step, decided.last_step) == (6, 7)


def test_the_last_step_follows_all_requested_steps() -> None:
    """With rl.max_staleness = 2, steps 7 and 8 are already requested when the rule holds after step 6."""
    run = Run(max_staleness=2)
    run.publish(0)
    assert train_until_a_rule_holds(run) == 6
    assert run.publish(6) == [msg.StepRequested(9, 6, is_last=True)]
    assert run.publish(8) == []
    assert run.publish(9) == [msg.RunFinished(9)]


@pytest.mark.parametrize(
    ("resumed_at", "max_staleness", "expected"),
    [
        (6, 0, [msg.StepRequested(7, 6, is_last=True)]),
        (7, 0, [msg.RunFinished(7)]),
        (6, 2, [msg.StepRequested(7, 6), msg.StepRequested(8, 6), msg.StepRequested(9, 6, is_last=True)]),
        (7, 2, [msg.StepRequested(8, 7), msg.StepRequested(9, 7, is_last=True)]),
    ],
)
def test_a_resumed_run_restores_the_decision_to_stop(
    resumed_at: int, max_staleness: int, expected: list[msg.AnyMessage]
) -> None:
    run = Run(*outcomes(RISING_THEN_FLAT)[:resumed_at], max_staleness=max_staleness)
    assert run.publish(resumed_at) == expected


def test_a_rule_that_holds_after_the_last_step_adds_no_step() -> None:
    run = Run(*outcomes(RISING_THEN_FLAT)[:6], steps=6)
    assert run.publish(6) == [msg.RunFinished(6)]


def test_a_run_that_stops_early_is_evaluated_at_its_end() -> None:
    run = Run(*outcomes(RISING_THEN_FLAT), questions=1)
    assert run.publish(7) == [msg.EvaluationRequested("end_sampled", Sampling(), 1, 7)]


def test_a_batch_message_of_an_earlier_format_is_not_the_last_batch() -> None:
    assert msg.BatchReady(3, ()).is_last is False

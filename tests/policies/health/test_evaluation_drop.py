"""Evaluations that fall while the training reward rises are reported; sampling noise is not."""

import random

import pytest

from asterism.bus import messages as msg
from asterism.configs.schema.health import HealthConfig
from asterism.policies.health.evaluation_drop import EvaluationPoint, count_standard_errors
from asterism.policies.recorder import Recorder
from tests.policies.health.histories import list_step_events

QUESTIONS = 200


class RecordedRun:
    def __init__(self, health: HealthConfig | None = None) -> None:
        self.recorder = Recorder(100, health)
        self.recorder.decide(0.0, msg.RunStarted(0, msg.BufferCursor()))
        self.reports: list[msg.HealthReported | msg.RunFailed] = []
        self._step = 0

    def train(self, reward: float) -> None:
        self._step += 1
        totals = msg.TaskCounts(groups=16, trajectories=128, reward=128 * reward, positives=int(128 * reward))
        events = list_step_events(self._step, msg.StepCounts(totals))
        self._add_reports(*(self.recorder.decide(float(self._step), event) for event in events))

    def evaluate(self, label: str, accuracy: float, sets: dict[str, msg.TaskCounts] | None = None) -> None:
        positives = round(QUESTIONS * accuracy)
        totals = msg.TaskCounts(trajectories=QUESTIONS, positives=positives, reward=positives, response_tokens=100)
        event = msg.EvaluationFinished(label, self._step, totals, sets=sets or {})
        self._add_reports(self.recorder.decide(float(self._step), event))

    def _add_reports(self, *effects: object) -> None:
        for sends in effects:
            for send in sends:  # pyright: ignore[reportGeneralTypeIssues]
                if send.to == "launcher" and isinstance(send.message, msg.HealthReported | msg.RunFailed):
                    self.reports.append(send.message)


def run_until_the_end(
    rewards: list[float], start: float, end: float, health: HealthConfig | None = None
) -> RecordedRun:
    run = RecordedRun(health)
    run.evaluate("start_sampled", start)
    run.evaluate("start_greedy", start)
    for reward in rewards:
        run.train(reward)
    run.evaluate("end_sampled", end)
    return run


RISING = [0.3 + 0.02 * step for step in range(20)]


def test_the_last_evaluation_of_a_run_is_checked_too() -> None:
    (report,) = run_until_the_end(RISING, 0.6, 0.3).reports
    assert isinstance(report, msg.HealthReported)
    assert (report.check, report.step) == ("evaluation_drop", 20)
    assert (
        "the accuracy of the sampled evaluation fell from 60.0% (version 0) to 30.0% (version 20), 6.0 standard errors "
        "(limit 5), while the training reward rose from 0.32 to 0.66" in report.message
    )
    assert "Usual cause: the policy exploits the training reward" in report.message


def test_the_action_stop_ends_the_run() -> None:
    run = run_until_the_end(RISING, 0.6, 0.3, HealthConfig(evaluation_drop="stop"))
    assert [type(each) for each in run.reports] == [msg.HealthReported, msg.RunFailed]
    assert run_until_the_end(RISING, 0.6, 0.3, HealthConfig(evaluation_drop="off")).reports == []


@pytest.mark.parametrize(
    ("rewards", "start", "end"),
    [
        (RISING, 0.6, 0.48),  # a fall of 2.4 standard errors
        (RISING, 0.3, 0.6),
        ([0.5 + 0.05 * (-1) ** step for step in range(20)], 0.6, 0.3),  # the reward does not rise
        (RISING[::-1][:4], 0.6, 0.3),  # the reward also falls, which reward_drop reports
    ],
)
def test_other_changes_are_not_reported_as_a_drop(rewards: list[float], start: float, end: float) -> None:
    reports = run_until_the_end(rewards, start, end).reports
    assert [each for each in reports if isinstance(each, msg.HealthReported) and "evaluation_drop" in each.checks] == []


def test_a_falling_set_is_named_although_the_sum_of_all_sets_rises() -> None:
    run = RecordedRun()
    for number in range(20):
        if number in (3, 18):
            hard = msg.TaskCounts(trajectories=100, positives=70 if number == 3 else 20)
            easy = msg.TaskCounts(trajectories=900, positives=300 if number == 3 else 800)
            run.evaluate("step_greedy", 0.5, {"hard": hard, "easy": easy})
        run.train(RISING[number])
    (report,) = run.reports
    assert isinstance(report, msg.HealthReported)
    assert "the accuracy of the set hard greedy evaluation fell from 70.0% (version 3) to 20.0%" in report.message


@pytest.mark.slow
def test_sampling_noise_of_healthy_runs_reports_nothing() -> None:
    draws = random.Random(0)
    for _ in range(300):
        run = RecordedRun()
        for step in range(20):
            run.train(0.3 + 0.03 * step)
            correct = sum(draws.random() < 0.5 for _ in range(QUESTIONS))
            run.evaluate("step_sampled", correct / QUESTIONS)
        assert run.reports == []


def test_the_standard_error_equals_that_of_a_difference_of_two_shares() -> None:
    before, after = EvaluationPoint(0, 0.6, 100.0, None), EvaluationPoint(9, 0.4, 400.0, 0.5)
    assert count_standard_errors(before, after) == pytest.approx(0.2 / (0.44 * 0.56 * (1 / 100 + 1 / 400)) ** 0.5)
    assert count_standard_errors(before, EvaluationPoint(9, 0.6, 1.0, 0.5)) == 0
    assert count_standard_errors(EvaluationPoint(0, 1.0, 5.0, None), EvaluationPoint(9, 1.0, 5.0, None)) == 0

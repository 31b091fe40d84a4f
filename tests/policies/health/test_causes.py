"""A health report names its cause first, even if only a symptom has triggered a check."""

from collections.abc import Mapping, Sequence

import pytest
from msgspec.structs import replace

from asterism.configs.schema.health import HealthConfig
from asterism.policies.health.health_monitor import Finding, HealthState, check_step
from tests.policies.health.histories import HEALTHY_STEPS

DIVERGED = {"reward": 0.0, "positive_share": 0.0, "overlong_share": 0.9, "groups_rejected": 16.0, "lr": 0.04}


def list_findings(
    steps: Sequence[Mapping[str, float]], health: HealthConfig | None = None, start_reward: float | None = None
) -> list[tuple[int, Finding]]:
    state = HealthState()
    if start_reward is not None:
        evaluation = {"reward": start_reward, "questions": 64.0, "failed": 0.0}
        state.history.add_evaluation(evaluation, 3, kind="sampled", version=0, is_start=True)
    return [
        (number, finding)
        for number, values in enumerate(steps, 1)
        for finding in check_step(state, values, health or HealthConfig())
    ]


def diverge(first_step: int, steps: int = 12) -> list[dict[str, float]]:
    return [{**HEALTHY_STEPS[0], **(DIVERGED if number >= first_step else {})} for number in range(1, steps + 1)]


@pytest.mark.parametrize("first_step", [2, 3, 5])
@pytest.mark.parametrize("start_reward", [None, 0.4])
def test_an_early_divergence_gives_one_report_that_names_the_learning_rate(
    first_step: int, start_reward: float | None
) -> None:
    ((step, finding),) = list_findings(diverge(first_step), start_reward=start_reward)
    assert step <= first_step + 3
    head = finding.message.partition(". Measured")[0]
    assert "most likely cause: the policy has diverged after too large updates: the reward fell from 0.35" in head
    assert "Change: lower learner.optimizer.lr (now 0.04)" in head
    assert "response_tokens" not in head
    assert "data.train" not in head


@pytest.mark.parametrize("symptom", ["length_limit", "equal_groups"])
def test_a_report_of_one_symptom_names_the_divergence(symptom: str) -> None:
    others = ("length_limit", "equal_groups", "reward_drop")
    health = replace(HealthConfig(), **{name: "off" for name in others if name != symptom})
    ((_, finding),) = list_findings(diverge(4), health)
    assert finding.checks == (symptom,)
    assert finding.message.startswith(f"health.{symptom}: most likely cause: the policy has diverged")


def test_reward_drop_finds_a_divergence_of_the_first_update() -> None:
    steps = [{"reward": 0.6}, *[{"reward": 0.02}] * 5]
    assert [finding.check for _, finding in list_findings(steps, start_reward=0.62)] == ["reward_drop"]
    assert [finding.check for _, finding in list_findings(steps)] == ["reward_drop"]


def test_an_easier_evaluation_at_the_start_is_no_drop() -> None:
    steps = [{"reward": 0.2 + 0.01 * step} for step in range(8)]
    assert list_findings(steps, start_reward=0.9) == []


def test_questions_that_are_too_hard_from_the_start_are_no_divergence() -> None:
    hard = {"reward": 0.0, "positive_share": 0.0, "groups": 16.0, "groups_rejected": 16.0, "updates": 0.0}
    ((step, finding),) = list_findings([hard] * 8, start_reward=0.0)
    assert (step, finding.checks) == (3, ("equal_groups", "no_updates"))
    assert "the questions are too hard" in finding.message.partition("Measured")[0]


def test_a_tool_that_always_times_out_is_the_cause_of_its_symptoms() -> None:
    fault = {"tool search: calls": 40.0, "tool search: timed_out": 40.0, "errors_in_positives": 1.0, "reward": 0.1}
    findings = list_findings([*HEALTHY_STEPS[20:30], *[{**HEALTHY_STEPS[30], **fault}] * 6])
    first = findings[0][1]
    assert first.message.startswith("health.reward_drop: most likely cause: the tool waits for a service that does not")
    last = findings[-1][1]
    assert last.checks[0] == "tool_timeouts"
    assert "100% of the calls of search in the last 3 steps end at their time limit" in last.message


def test_failures_of_evaluations_count_for_the_whole_run() -> None:
    state = HealthState()
    state.history.add_evaluation({"questions": 100.0, "failed": 30.0}, 3, kind="sampled", version=0, is_start=True)
    steps = [{"trajectories": 64.0, "trajectories_failed": 0.0}] * 4
    (finding,) = [each for values in steps for each in check_step(state, values, HealthConfig())]
    assert finding.check == "masked_trajectories"
    assert "30 of the 292 trajectories of the run are masked (10%, limit 5%)" in finding.message


def test_a_shorter_run_without_an_update_is_reported_at_its_end() -> None:
    state = HealthState()
    state.history.run_steps = 2
    reports = [check_step(state, {"updates": 0.0}, HealthConfig()) for _ in range(2)]
    assert [len(each) for each in reports] == [0, 1]


def test_a_confident_disagreement_of_a_stale_token_is_normal() -> None:
    stale = [{"mismatch_confident": 5.0, "staleness_max": 1.0}] * 3
    assert list_findings(stale) == []
    fresh = [{"mismatch_confident": 1.0, "staleness_max": 0.0}]
    assert [finding.check for _, finding in list_findings(fresh)] == ["confident_tokens"]


def test_a_check_with_the_action_stop_is_reported_even_if_its_cause_was_reported() -> None:
    health = HealthConfig(equal_groups="stop", length_limit_share=0.05)
    late = [{**values, "groups_rejected": 0.0} for values in diverge(3, 7)] + diverge(1, 4)
    findings = [finding for _, finding in list_findings(late, health)]
    assert [finding.action for finding in findings][-1] == "stop"
    assert findings[-1].checks == ("equal_groups",)

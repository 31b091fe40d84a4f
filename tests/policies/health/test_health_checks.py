"""Each planted fault triggers its health check within a few steps, and no other check."""

import math
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from asterism.configs.schema.health import HealthConfig
from asterism.policies.health.health_checks import HEALTH_CHECKS
from asterism.policies.health.health_monitor import HealthState, check_step
from asterism.policies.health.step_history import METRICS_READ
from tests.policies.health.histories import EVALUATION, FAULTS, HEALTHY_STEPS, PlantedFault, plant

MAX_DELAY_STEPS = 5
MAX_SLOW_DELAY_STEPS = 15  # longest delay of the checks with longer windows


def list_reports(
    steps: Sequence[Mapping[str, float]], health: HealthConfig | None = None
) -> list[tuple[int, str, str]]:
    """List the step, the check and the message of every report."""
    state, reports = HealthState(), list[tuple[int, str, str]]()
    for number, values in enumerate(steps, 1):
        if number % 3 == 0:
            evaluated = {"accuracy": values.get(EVALUATION, 0.5), "questions": 500.0}
            state.history.add_evaluation(evaluated, 3, kind="sampled", version=number, is_start=False)
        found = check_step(state, values, health or HealthConfig())
        reports += [(number, finding.check, finding.message) for finding in found]
    return reports


def test_a_healthy_run_triggers_no_check() -> None:
    assert len(HEALTHY_STEPS) == 60
    assert list_reports(HEALTHY_STEPS) == []


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.check}-{fault.first_step}")
@pytest.mark.slow
def test_a_planted_fault_soon_triggers_its_check_and_no_other_check(fault: PlantedFault) -> None:
    reports = list_reports(plant(fault))
    assert {check for _, check, _ in reports} == {fault.check}
    is_slow = fault.check in ("length_limit", "tool_errors")
    delay = MAX_SLOW_DELAY_STEPS if is_slow else MAX_DELAY_STEPS
    assert fault.first_step <= reports[0][0] < fault.first_step + delay
    assert list_reports(plant(fault), replace(HealthConfig(), **dict.fromkeys((fault.check, *fault.also), "off"))) == []


def test_every_check_has_a_planted_fault() -> None:
    assert {fault.check for fault in FAULTS} == set(HEALTH_CHECKS)


def test_a_message_names_the_numbers_the_limit_the_cause_and_the_keys_to_change() -> None:
    (message,) = [message for _, _, message in list_reports(plant(FAULTS[0]))]
    assert message == (
        "health.length_limit: 35% of the trajectories of the last 3 steps reach the length limit (limit 20%). Usual "
        "cause: answers grow during training, or the model repeats itself until the limit. Change: raise "
        "dialogue.response_tokens, or make long answers cost reward (reward.functions)."
    )


@pytest.mark.parametrize(
    "fault", [fault for fault in FAULTS if fault.check in ("tool_timeouts", "clipping", "recomputation")]
)
def test_two_steps_with_a_fault_trigger_no_check(fault: PlantedFault) -> None:
    assert list_reports(plant(replace(fault, steps=2))) == []
    assert len(list_reports(plant(replace(fault, steps=3)))) == 1


def test_a_lasting_problem_is_reported_once_unless_it_is_absent_for_a_window() -> None:
    high, low = {"clip_fraction": 0.5}, {"clip_fraction": 0.0}
    steps = [high] * 10 + [low] * 2 + [high] * 5 + [low] * 3 + [high] * 5
    assert [(step, check) for step, check, _ in list_reports(steps)] == [(3, "clipping"), (23, "clipping")]


def test_equal_rewards_of_solved_questions_are_healthy() -> None:
    steps = [{"groups": 16.0, "groups_rejected": 16.0, "positive_share": share} for share in (1.0, 0.95, 1.0, 0.99)]
    assert list_reports(steps) == []
    unsolved = [{**values, "positive_share": 0.02} for values in steps]
    assert [check for _, check, _ in list_reports(unsolved)] == ["equal_groups"]


def test_noise_of_a_small_reward_triggers_no_check() -> None:
    steps = [{"reward": 0.01 + 0.01 * (step % 2)} for step in range(12)] + [{"reward": 0.008}] * 5
    assert list_reports(steps) == []


def test_a_drop_of_negative_rewards_is_compared_with_their_earlier_gain() -> None:
    rising = [{"reward": -1.0 + 0.1 * step} for step in range(10)]
    assert list_reports([*rising, {"reward": -0.2}, {"reward": -0.2}]) == []
    assert [check for _, check, _ in list_reports([*rising, *[{"reward": -0.8}] * 3])] == ["reward_drop"]


@given(
    steps=st.lists(
        st.dictionaries(
            st.sampled_from((*METRICS_READ, "failed: engine")), st.floats(allow_nan=True, allow_infinity=True)
        ),
        max_size=12,
    ),
    window_steps=st.integers(1, 4),
)
def test_any_values_and_missing_metrics_are_accepted(steps: list[dict[str, float]], window_steps: int) -> None:
    reports = list_reports(steps, HealthConfig(window_steps=window_steps))
    assert {check for _, check, _ in reports} <= set(HEALTH_CHECKS)


@pytest.mark.slow
@given(data=st.data())
def test_missing_metrics_of_a_healthy_run_trigger_no_check(data: st.DataObject) -> None:
    names = st.sets(st.sampled_from(METRICS_READ), max_size=4)
    steps = [
        {name: value for name, value in values.items() if name not in missing}
        for values in HEALTHY_STEPS[:20]
        for missing in [data.draw(names)]
    ]
    assert list_reports(steps) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", METRICS_READ)
def test_a_value_that_is_not_finite_triggers_only_the_checks_of_numerics(name: str) -> None:
    steps = [{**values, name: math.nan} for values in HEALTHY_STEPS]
    numerics = ("loss", "grad_norm", "entropy")
    expected = (
        {"skipped_updates"}
        if name in numerics
        else {"mismatch"}
        if name in ("mismatch_k3", "mismatch_above_1")
        else set[str]()
    )
    assert {check for _, check, _ in list_reports(steps)} == expected

"""Runs the health checks at the end of each step, and reports each problem once until it ends.

A check that found a problem gives no further report while the problem lasts. After a whole window of healthy steps, the
check can report again. Checks that trigger in the same step give one report with ranked causes. A later check with a
cause that is already reported gives no report, unless its action is "stop".
"""

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

import msgspec

from asterism.configs.schema.health import Action, HealthConfig
from asterism.policies.health.causes import RankedCause, rank_causes
from asterism.policies.health.health_checks import HEALTH_CHECKS
from asterism.policies.health.step_history import StepHistory


class HealthState(msgspec.Struct):
    history: StepHistory = msgspec.field(default_factory=StepHistory)
    healthy_steps: dict[str, int] = {}  # consecutive healthy steps of each check that found a problem
    reported_cause: str = ""  # reported cause with evidence, while its checks still find a problem


class Finding(NamedTuple):
    check: str  # the check's key in [health]; the first of `checks`
    action: Literal["warn", "stop"]
    message: str  # numbers, causes, keys to change
    checks: tuple[str, ...]  # checks that triggered in this step


def get_action(health: HealthConfig, check: str) -> Action:
    return getattr(health, check)


def check_step(state: HealthState, values: Mapping[str, float], health: HealthConfig) -> list[Finding]:
    """Add the metrics of the step that has just ended, and return the problem to report, if any."""
    state.history.add_step(values, health.window_steps)
    return _check_history(state, health, HEALTH_CHECKS)


def check_evaluation(state: HealthState, health: HealthConfig) -> list[Finding]:
    """Return the problem to report after an evaluation, if any; the evaluation may be the end of the run."""
    return _check_history(state, health, ("evaluation_drop",))


def _check_history(state: HealthState, health: HealthConfig, checks: Iterable[str]) -> list[Finding]:
    found = {name: numbers for name in checks if (numbers := _find_problem(state, name, health)) is not None}
    if not state.healthy_steps:
        state.reported_cause = ""
    if not found:
        return []
    causes = rank_causes(state.history, health, state.healthy_steps)
    stops = any(get_action(health, name) == "stop" for name in found)
    if causes[0].name == state.reported_cause and not stops:
        return []
    state.reported_cause = "" if causes[0].name in HEALTH_CHECKS else causes[0].name
    names = sorted(found, key=lambda name: name != causes[0].name)  # a stable sort keeps the other checks in order
    action = "stop" if stops else "warn"
    return [Finding(names[0], action, _format_message(found, names, causes), tuple(names))]


def _format_message(found: Mapping[str, str], names: list[str], causes: list[RankedCause]) -> str:
    """Format the problem: numbers first for a single check without evidence of another cause, else the cause first."""
    first, *others = causes
    title = ", ".join(f"health.{name}" for name in names)
    numbers = "; ".join(found[name] for name in names)
    if not others and first.name in found:
        return f"{title}: {numbers}. Usual cause: {first.cause}. Change: {first.change}."
    ranked = "".join(f" {place}. {each.cause} ({each.change})." for place, each in enumerate(others, 2))
    return (
        f"{title}: most likely cause: {first.cause}. Change: {first.change}. Measured: {numbers}. Less likely:{ranked}"
    )


def _find_problem(state: HealthState, name: str, health: HealthConfig) -> str | None:
    """Return the numbers of a check that triggers in this step, else None."""
    if get_action(health, name) == "off":
        return None
    numbers = HEALTH_CHECKS[name].measure(state.history, health)
    if numbers is None:
        _count_healthy_step(state, name, health.window_steps)
        return None
    is_known = name in state.healthy_steps
    state.healthy_steps[name] = 0
    return None if is_known else numbers


def _count_healthy_step(state: HealthState, name: str, window_steps: int) -> None:
    if name in state.healthy_steps:
        state.healthy_steps[name] += 1
        # After one healthy step, a condition on a whole window stays false for `window_steps - 1` further steps.
        if state.healthy_steps[name] >= 2 * window_steps - 1:
            del state.healthy_steps[name]

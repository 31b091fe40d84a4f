"""Runs the health checks at the end of each step, and reports a problem once until it is over.

A check that found a problem is silent while the problem lasts. After a whole window of healthy steps, the check can
report again.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

import msgspec

from configs.health_options import Action, HealthConfig
from policies.health.health_checks import HEALTH_CHECKS
from policies.health.step_history import StepHistory


class HealthState(msgspec.Struct):
    history: StepHistory = msgspec.field(default_factory=StepHistory)
    healthy_steps: dict[str, int] = {}  # by check that found a problem: steps in a row without it


class Finding(NamedTuple):
    check: str  # its key in [health]
    action: Literal["warn", "stop"]
    message: str  # numbers, usual cause, keys to change


def get_action(health: HealthConfig, check: str) -> Action:
    return getattr(health, check)


def check_step(state: HealthState, values: Mapping[str, float], health: HealthConfig) -> list[Finding]:
    """Add the metrics of the step that has just ended, and return the problems to report."""
    state.history.add_step(values, health.window_steps)
    findings = [_find_problem(state, name, health) for name in HEALTH_CHECKS]
    return [finding for finding in findings if finding is not None]


def _find_problem(state: HealthState, name: str, health: HealthConfig) -> Finding | None:
    action = get_action(health, name)
    if action == "off":
        return None
    check = HEALTH_CHECKS[name]
    numbers = check.measure(state.history, health)
    if numbers is None:
        _count_healthy_step(state, name, health.window_steps)
        return None
    is_known = name in state.healthy_steps
    state.healthy_steps[name] = 0
    if is_known:
        return None
    message = f"health.{name}: {numbers}. Usual cause: {check.cause}. Change: {check.change}."
    return Finding(name, action, message)


def _count_healthy_step(state: HealthState, name: str, window_steps: int) -> None:
    if name in state.healthy_steps:
        state.healthy_steps[name] += 1
        # A condition of a whole window fails for `window_steps - 1` further steps after one healthy step.
        if state.healthy_steps[name] >= 2 * window_steps - 1:
            del state.healthy_steps[name]

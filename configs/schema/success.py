"""Parses evaluation.success, the rule for correct answers. docs/rewards.md explains the rules."""

import math
import operator
import re
from collections.abc import Callable, Mapping

import msgspec

REWARD = "reward"  # name of the weighted sum in evaluation.success
_COMPARISONS: Mapping[str, Callable[[float, float], bool]] = {">": operator.gt, ">=": operator.ge}
_RULE = re.compile(r"\s*([A-Za-z_][\w.]*)\s*(?:(>=|>)\s*([+-]?[\d.]+(?:[eE][+-]?\d+)?)\s*)?")
_FORMS = 'expected the name of a component ("correct"), or a lower limit ("correct >= 1", "reward > 0.5")'


class SuccessRule(msgspec.Struct, frozen=True):
    """A lower limit of the reward or of one component. A trajectory without this component is not correct."""

    name: str = REWARD  # name of a component, or REWARD
    comparison: str = ">"
    limit: float = 0.0

    def is_met(self, reward: float, components: Mapping[str, float]) -> bool:
        value = reward if self.name == REWARD else components.get(self.name)
        return value is not None and _COMPARISONS[self.comparison](value, self.limit)

    def describe(self) -> str:
        return f"{self.name} {self.comparison} {self.limit:g}"


def parse_success(text: str) -> SuccessRule:
    """Parse a rule; a component without a limit must be at least 1. Raises ValueError."""
    found = _RULE.fullmatch(text)
    if found is None:
        raise ValueError(f'success = "{text}" is no criterion; {_FORMS}')
    name, comparison, limit_text = found.groups()
    if comparison is None:
        if name == REWARD:
            raise ValueError(f'success = "{text}" has no limit; {_FORMS}')
        return SuccessRule(name, ">=", 1.0)
    try:
        limit = float(limit_text)
    except ValueError:
        limit = math.nan
    if not math.isfinite(limit):
        raise ValueError(f'success = "{text}": {limit_text} is no finite number; {_FORMS}')
    return SuccessRule(name, comparison, limit)

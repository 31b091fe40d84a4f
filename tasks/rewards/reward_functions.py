"""Calls reward functions with the signature of TRL or of verl, sync or async.

TRL    reward(prompts, completions, completion_ids, **columns) -> list[float | None]
verl   compute_score(data_source, solution_str, ground_truth, extra_info=None) -> float | dict

A function in TRL's form receives lists of one element, for the parameters in its signature. Its result None means "not
scored". Sources: trl/docs/source/grpo_trainer.md; verl/docs/preparation/reward_function.rst.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, SupportsFloat, cast

from asterism.configs.errors import UnusableInput
from asterism.configs.import_path import load_object
from asterism.tasks.contract import SANDBOX, SandboxHandle
from asterism.tasks.rewards.finished_rollout import FinishedRollout

_MAX_VALUE_CHARACTERS = 80
_KEYWORD_KINDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class UnusableReward(Exception):
    """A function raised, returned no reward, or needs a column that the row lacks."""


class RewardFunction:
    """The reward function of the component `name`. Raises UnusableInput for an object without a usable signature."""

    def __init__(self, name: str, function: object, key: str) -> None:
        if not callable(function):
            raise UnusableInput(f"{key}: {function!r} is not callable")
        self.name = name
        self.function = cast(Callable[..., Any], function)
        try:
            parameters = inspect.signature(self.function).parameters
        except ValueError:
            raise UnusableInput(f"{key}: {name} has no signature in Python") from None
        self._parameters = {each.name: each for each in parameters.values() if each.kind in _KEYWORD_KINDS}
        self._takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
        self._is_verl = "solution_str" in parameters
        if (
            not self._is_verl
            and not self._takes_all
            and not self._parameters.keys() & {"completions", "completion_ids"}
        ):
            raise UnusableInput(
                f"{key}: {name}({', '.join(parameters)}) has neither TRL's parameter `completions` nor verl's `solution_str`"
            )

    def build_arguments(
        self,
        rollout: FinishedRollout,
        metrics: dict[str, float],
        environment: object | None = None,
        sandbox: SandboxHandle | None = None,
    ) -> dict[str, Any]:
        """Return the arguments of a call by name. `metrics` receives the logged metrics. Raises UnusableReward."""
        offered = _offer_verl(rollout) if self._is_verl else _offer_trl(rollout, metrics, environment)
        if SANDBOX in self._parameters:
            offered[SANDBOX] = sandbox
        missing = [
            name
            for name, parameter in self._parameters.items()
            if parameter.default is inspect.Parameter.empty and name not in offered
        ]
        if missing:
            raise UnusableReward(f"{self.name}: the row has no column `{missing[0]}`; it has {', '.join(rollout.row)}")
        return offered if self._takes_all else {name: offered[name] for name in self._parameters if name in offered}

    def parse_result(self, result: object, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the reward, if the function scored, and metrics as NAME.METRIC. Raises UnusableReward."""
        extra: dict[str, object] = dict(metrics)
        if self._is_verl and isinstance(result, dict):
            extra |= {str(name): value for name, value in cast(dict[Any, object], result).items() if name != "score"}
            result = cast(dict[Any, object], result).get("score")
        elif not self._is_verl:
            if not isinstance(result, list) or len(cast(list[object], result)) != 1:
                raise UnusableReward(f"{self.name} returned {_shorten(result)}; expected a list of one reward")
            result = cast(list[object], result)[0]
        components = {} if result is None and not self._is_verl else {self.name: self._parse_number(result)}
        for name, value in extra.items():
            if isinstance(value, SupportsFloat) and math.isfinite(float(value)):
                components[f"{self.name}.{name}"] = float(value)
        return components

    def _parse_number(self, value: object) -> float:
        if not isinstance(value, SupportsFloat) or not math.isfinite(number := float(value)):
            raise UnusableReward(f"{self.name} returned {_shorten(value)}; expected a finite number")
        return number


def load_reward_functions(functions: Mapping[str, str], name_key: str = "") -> list[RewardFunction]:
    """Load the functions by component. `name_key`: prefix of keys, such as "tasks.math.". Raises UnusableInput."""
    loaded: list[RewardFunction] = []
    for name, spec in functions.items():
        key = f"{name_key}reward.functions.{name}"
        loaded.append(RewardFunction(name, load_object(spec, key), key))
    return loaded


def _offer_trl(rollout: FinishedRollout, metrics: dict[str, float], environment: object | None) -> dict[str, Any]:
    """Return the arguments by parameter name; TRL's names take precedence over columns."""
    columns = {name: [value] for name, value in rollout.row.items()}
    return {
        **columns,
        "prompts": [[{"role": "user", "content": rollout.row.get("question", "")}]],
        "completions": [rollout.messages],
        "completion_ids": [rollout.response_ids],
        "ending": [rollout.ending],
        "trainer_state": None,
        "environments": None if environment is None else [environment],
        "log_extra": _ignore_extra,
        "log_metric": metrics.__setitem__,
    }


def _offer_verl(rollout: FinishedRollout) -> dict[str, Any]:
    return {
        "data_source": rollout.row.get("data_source", ""),
        "solution_str": rollout.response,
        "ground_truth": rollout.row.get("ground_truth", ""),
        "extra_info": rollout.row.get("extra_info"),
    }


def _ignore_extra(column: str, values: list[object]) -> None:
    """Ignore the extra columns of TRL's table of completions."""


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_VALUE_CHARACTERS else f"{text[:_MAX_VALUE_CHARACTERS]}..."

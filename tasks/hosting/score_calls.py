"""Scores a trajectory with the reward functions of its task. Sync functions run one at a time."""

import sys
import traceback
from collections.abc import Mapping
from typing import Any

from asterism.bus.messages import AnswerSubmitted
from asterism.configs.loading.secret_references import hide_secrets
from asterism.tasks.hosting.call_results import describe_error, replace_surrogates
from asterism.tasks.hosting.function_caller import CallTimedOut, FunctionCaller
from asterism.tasks.hosting.program_handle import ProgramHandle
from asterism.tasks.hosting.wire import HostSettings
from asterism.tasks.rewards.finished_rollout import FinishedRollout, RolloutReader
from asterism.tasks.rewards.reward_functions import RewardFunction, UnusableReward, load_reward_functions

_MAX_ERROR_CHARACTERS = 4000
_MAX_TRACEBACKS = 100  # tracebacks of one process


class RewardCalls:
    def __init__(
        self, functions: list[RewardFunction], reader: RolloutReader, limit_s: float, secrets: Mapping[str, str]
    ) -> None:
        """`secrets`: see HostSettings."""
        self._functions, self._reader, self._limit_s, self._secrets = functions, reader, limit_s, secrets
        self.runner = FunctionCaller(1)
        self._logged: set[tuple[str, str, int | None]] = set()  # logged tracebacks by function, error and line

    @property
    def num_abandoned(self) -> int:
        return self.runner.num_abandoned

    async def score(
        self, submission: AnswerSubmitted, environment: object | None, sandbox: ProgramHandle
    ) -> dict[str, float]:
        """Return the components by name. Raises UnusableReward, also for an exception of a function."""
        rollout = self._reader.read(submission)
        components: dict[str, float] = {}
        for function in self._functions:
            components |= await self._call(function, rollout, environment, sandbox)
        return components

    async def _call(
        self, function: RewardFunction, rollout: FinishedRollout, environment: object | None, sandbox: ProgramHandle
    ) -> dict[str, float]:
        metrics: dict[str, float] = {}
        arguments: dict[str, Any] = function.build_arguments(rollout, metrics, environment, sandbox)
        try:
            result = await self.runner.call(function.function, self._limit_s, **arguments)
        except CallTimedOut as error:
            raise UnusableReward(f"{function.name} {error}") from None
        except (Exception, SystemExit) as error:  # from the user's code
            self._log_first_traceback(function, error)
            raise UnusableReward(f"{function.name} raised {describe_error(error, _MAX_ERROR_CHARACTERS)}") from error
        return function.parse_result(result, metrics)

    def _log_first_traceback(self, function: RewardFunction, error: BaseException) -> None:
        """Write a traceback to stderr, which is the executor's output file, once for each line that raises."""
        frames = traceback.extract_tb(error.__traceback__)
        place = (function.name, type(error).__name__, frames[-1].lineno if frames else None)
        if place not in self._logged and len(self._logged) < _MAX_TRACEBACKS:
            self._logged.add(place)
            text = hide_secrets("".join(traceback.format_exception(error)), self._secrets)[-_MAX_ERROR_CHARACTERS:]
            sys.stderr.write(
                f"{replace_surrogates(text)}(reward function {function.name}; the same line is shown once)\n"
            )
            sys.stderr.flush()


def load_reward_calls(settings: HostSettings, *, with_tokenizer: bool) -> RewardCalls | None:
    """Load the reward functions. Return None without functions or tokenizer. Raises UnusableInput with the key."""
    functions = load_reward_functions(settings.functions, settings.name_key)
    if not functions or not with_tokenizer:
        return None
    from asterism.engine.hf.tokenizer import load_tokenizer  # an interpreter of a task may lack the package

    reader = RolloutReader(load_tokenizer(settings.checkpoint), settings.prefill, settings.stop_tokens)
    return RewardCalls(functions, reader, settings.reward_limit_s, settings.secrets)

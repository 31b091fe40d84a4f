"""The instances of an environment or a dialogue in a host process: one for each live trajectory."""

import asyncio
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from asterism.tasks.contract import SANDBOX
from asterism.tasks.hosting.call_results import UnusableResult, parse_number, parse_numbers, render_text
from asterism.tasks.hosting.function_caller import CallTimedOut, FunctionCaller, Running
from asterism.tasks.hosting.loaded_task import LoadedTask

ENVIRONMENT = "environment"  # component for a number that `get_reward` returns


class Instance:
    """An instance without overlapping calls: each call waits for the previous call, even for an abandoned one."""

    def __init__(self, task: LoadedTask, runner: FunctionCaller, limit_s: float) -> None:
        self._task, self._runner, self._limit_s = task, runner, limit_s
        self._turn = asyncio.Lock()
        self._abandoned: Running | None = None
        self._sandbox: object = None
        self._is_closed = False
        self.object: Any = None

    async def open(self, row: dict[str, Any], sandbox: object) -> object:
        """Return the user's opening text: the row's question, and the result of `reset` or `init`."""
        self._sandbox = sandbox
        self.object = await self._call(self._task.create, sandbox=sandbox)
        question = row.get("question") or ""
        if self._task.kind == "dialogue":
            opening = await self._call(self.object.init, row=row)
            return _join_opening(question, opening)
        observation = await self._call(self.object.reset, **select_arguments(self.object.reset, row))
        return question if observation is None else question + render_text(observation)

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> object:
        if self._task.has_dynamic_tools:
            return await self._call(self.object.call_tool, name=name, arguments=arguments)
        method = getattr(self.object, name)
        extra = {SANDBOX: self._sandbox} if self._task.takes_sandbox(method) else {}
        return await self._call(method, **arguments, **extra)

    async def step(self, message: dict[str, Any]) -> object:
        return await self._call(self.object.step, message=message)

    async def get_reward(self) -> dict[str, float]:
        """Return the components of `get_reward`, or none without that method. Raises UnusableResult."""
        if not self._task.has_reward:
            return {}
        value = await self._call(self.object.get_reward)
        if isinstance(value, dict):
            return parse_numbers(value, "reward")  # pyright: ignore[reportUnknownArgumentType]
        return {ENVIRONMENT: parse_number(value, "reward")}

    async def close(self) -> None:
        """Close the instance once, after waiting `limit_s` for an abandoned call. Raises the exceptions of `close`."""
        if self._is_closed:
            return
        self._is_closed = True
        ended = await self._wait_for_abandoned()
        created, self.object = self.object, None
        if created is None and self._abandoned is not None and ended:  # the constructor exceeded the limit
            created = self._abandoned.result().value
        if callable(close := getattr(created, "close", None)):
            await self._runner.call(close, self._limit_s)

    async def _call(self, function: Callable[..., Any], /, **arguments: Any) -> Any:
        """Call a function of the instance. Raises CallTimedOut, and the function's exceptions."""
        async with self._turn:
            if not await self._wait_for_abandoned():
                raise CallTimedOut(self._limit_s)
            return await self._runner.call(function, self._limit_s, self._set_abandoned, **arguments)

    def _set_abandoned(self, running: Running) -> None:
        self._abandoned = running

    async def _wait_for_abandoned(self) -> bool:
        """Wait up to the limit for an abandoned call, and return whether none is left."""
        if self._abandoned is not None:
            await asyncio.wait([self._abandoned], timeout=self._limit_s)
        return self._abandoned is None or self._abandoned.done()


def _join_opening(question: str, opening: Any) -> object:
    """Return the question and the messages of `init` as one text."""
    if opening is None:
        return question
    messages = opening.get("messages", opening) if isinstance(opening, dict) else getattr(opening, "messages", opening)
    return "\n\n".join(filter(None, (question, render_text(messages))))


def select_arguments(function: Callable[..., object], offered: Mapping[str, Any]) -> dict[str, Any]:
    """Select the arguments in the signature, or all for **kwargs. Raises UnusableResult for a missing argument."""
    parameters = inspect.signature(function).parameters.values()
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters):
        return dict(offered)
    for each in parameters:
        if each.default is each.empty and each.name not in offered and each.kind is not each.VAR_POSITIONAL:
            raise UnusableResult(f"needs the column `{each.name}`; the row has {', '.join(offered)}")
    return {each.name: offered[each.name] for each in parameters if each.name in offered}

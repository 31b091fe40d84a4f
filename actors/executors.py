"""The executors of a node: started, and started again when they die.

The launcher's side of joining and leaving. Each start of an executor is a life of its own, with an address of its own,
so that nothing that was meant for the last one is done by the next. An executor says that it joins; rollouts hear it,
and that it left, from here alone, and so in this order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import count

import structlog

from actors.children import Child, Children, death_of, threads
from bus.messages import ExecutorJoined, ExecutorLeft, ExecutorProved
from bus.transport import Bus, process_of
from configs.errors import UNUSABLE

RESTARTS = 5  # in a row without a result in between; then the run ends
_PAUSE_S = 0.1  # before the first of them; doubled each time


class Executors:
    def __init__(
        self,
        names: Sequence[str],
        rollouts: Sequence[str],
        bus: Bus,
        children: Children,
        argv: Callable[[str, int], Sequence[str]],
        pause_s: float = _PAUSE_S,
    ) -> None:
        """`argv` is the command line of an executor's life, by name and number."""
        self.names = names
        self._rollouts = rollouts
        self._bus = bus
        self._children = children
        self._argv = argv
        self._pause_s = pause_s
        self._living: set[str] = set()  # addresses
        self._joined: set[str] = set()  # those of them that rollouts know of
        self._failures = dict.fromkeys(names, 0)
        self._tasks: list[asyncio.Task[None]] = []
        self._logger = structlog.get_logger()

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._keep(name), name=name) for name in self.names]

    async def until_given_up(self) -> None:
        """Raises ProcessDied when an executor has died too often."""
        await asyncio.wait(self._tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in self._tasks:
            if task.done():
                task.result()

    async def stop(self) -> None:
        """No executor is started any more; those that live are the children's to end."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ---------------------------------------------------------------- what executors say

    async def joined(self, event: ExecutorJoined) -> None:
        if event.executor not in self._living:  # it has died meanwhile
            return
        self._joined.add(event.executor)
        self._logger.info("executor.joined", executor=event.executor, slots=event.slots)
        await self._tell(event)

    def proved(self, event: ExecutorProved) -> None:
        self._failures[process_of(event.executor)] = 0

    # ---------------------------------------------------------------- lives

    async def _keep(self, name: str) -> None:
        """One life after the other. Raises ProcessDied."""
        for life in count(1):
            address = f"{name}/{life}"
            self._living.add(address)
            child = await self._children.spawn(name, self._argv(name, life), threads(1))
            await child.process.wait()
            await self._left(address, child)
            await asyncio.sleep(self._pause_s * 2 ** (self._failures[name] - 1))

    async def _left(self, address: str, child: Child) -> None:
        self._living.discard(address)
        exit_code = child.process.returncode
        self._failures[child.name] += 1
        self._logger.error(
            "executor.left", executor=address, exit_code=exit_code, failures_in_a_row=self._failures[child.name]
        )
        never_joined = address not in self._joined
        if never_joined and address.endswith("/1") and exit_code == UNUSABLE:  # another try would say the same
            raise death_of(child)
        if not never_joined:
            self._joined.discard(address)
            await self._tell(ExecutorLeft(address, f"{child.name} ended with exit code {exit_code}"))
        if self._failures[child.name] > RESTARTS:
            raise death_of(child, f"{self._failures[child.name]} times without a result, at last ")

    async def _tell(self, event: ExecutorJoined | ExecutorLeft) -> None:
        for rollout in self._rollouts:
            await self._bus.send(rollout, event)

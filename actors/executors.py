"""The executors of a node, as the launcher sees them: who has joined, who has left, and who hears of it.

Each start of an executor is a life of its own, with an address of its own, so that nothing that was meant for the last
one is done by the next. An executor says that it joins; rollouts hear it, and that it left, from here alone, and so in
this order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import structlog

from actors.children import Child, ended_with
from actors.supervisor import Program
from bus.messages import ExecutorJoined, ExecutorLeft
from bus.transport import Bus, process_of
from configs.errors import UNUSABLE


class Executors:
    def __init__(
        self, names: Sequence[str], rollouts: Sequence[str], bus: Bus, argv: Callable[[str, int], Sequence[str]]
    ) -> None:
        """`argv` is the command line of an executor's life, by name and number."""
        self._names = names
        self._rollouts = rollouts
        self._bus = bus
        self._argv = argv
        self._over: set[str] = set()  # addresses
        self._joined: set[str] = set()  # those that rollouts know of
        self._gone: set[str] = set()  # processes of nodes that have left
        self._logger = structlog.get_logger()

    def programs(self) -> Mapping[str, Program]:
        """An executor has proved itself with its first result, and not by living on."""
        return {
            name: Program(
                lambda life, name=name: self._argv(name, life),
                forgiven=False,
                left=self._left,
                helpless=self._helpless,
            )
            for name in self._names
        }

    async def joined(self, event: ExecutorJoined) -> None:
        if event.executor in self._over or process_of(event.executor) in self._gone:  # it has died meanwhile
            return
        self._joined.add(event.executor)
        self._logger.info("executor.joined", executor=event.executor, slots=event.slots)
        await self._tell(event)

    async def left(self, address: str, cause: str) -> None:
        self._over.add(address)
        self._logger.error("executor.left", executor=address, cause=cause)
        if address in self._joined:
            self._joined.discard(address)
            await self._tell(ExecutorLeft(address, cause))

    async def all_left(self, name: str, cause: str) -> None:
        """All lives of that executor, also those that are yet to join."""
        self._gone.add(name)
        for address in [each for each in self._joined if process_of(each) == name]:
            await self.left(address, cause)

    async def _left(self, life: int, child: Child) -> None:
        await self.left(f"{child.name}/{life}", ended_with(child))

    def _helpless(self, life: int, child: Child) -> bool:
        """What its first life could not use, no other one can. Later on it may be the machine that is at fault."""
        return life == 1 and f"{child.name}/1" not in self._joined and child.process.returncode == UNUSABLE

    async def _tell(self, event: ExecutorJoined | ExecutorLeft) -> None:
        for rollout in self._rollouts:
            await self._bus.send(rollout, event)

"""The launcher's registry of executors records joins and departures, and notifies the rollouts.

Each incarnation of an executor has a separate address, so that no message for an earlier one reaches a later one. Only
this registry forwards joins and departures to rollouts, which therefore receive them in order.
"""

from collections.abc import Callable, Mapping, Sequence

import structlog

from asterism.actors.launch.child_processes import ChildProcess, describe_exit
from asterism.actors.launch.supervisor import Program
from asterism.bus.addresses import parse_process
from asterism.bus.bus import Bus
from asterism.bus.messages import ExecutorJoined, ExecutorLeft
from asterism.configs.errors import EXIT_UNUSABLE


class ExecutorRegistry:
    def __init__(
        self, names: Sequence[str], rollouts: Sequence[str], bus: Bus, build_argv: Callable[[str, int], Sequence[str]]
    ) -> None:
        """`build_argv` makes the command line of an executor from its name and incarnation."""
        self._names = names
        self._rollouts = rollouts
        self._bus = bus
        self._build_argv = build_argv
        self._exited: set[str] = set()  # addresses of incarnations that have ended
        self._joined: set[str] = set()  # addresses that were announced to rollouts
        self._departed: set[str] = set()  # names of processes of departed nodes
        self._logger = structlog.get_logger()

    def build_programs(self) -> Mapping[str, Program]:
        """Build one program per executor. The first result (ExecutorHealthy), not a running time, resets failures."""
        return {
            name: Program(
                lambda incarnation, name=name: self._build_argv(name, incarnation),
                resets_failures=False,
                on_exit=self._on_exit,
                is_fatal_exit=self._is_fatal_exit,
            )
            for name in self._names
        }

    async def on_joined(self, event: ExecutorJoined) -> None:
        if event.executor in self._exited or parse_process(event.executor) in self._departed:
            return
        self._joined.add(event.executor)
        self._logger.info("executor.joined", executor=event.executor, slots=event.slots)
        await self._notify_rollouts(event)

    async def on_left(self, address: str, cause: str) -> None:
        self._exited.add(address)
        self._logger.error("executor.left", executor=address, cause=cause)
        if address in self._joined:
            self._joined.discard(address)
            await self._notify_rollouts(ExecutorLeft(address, cause))

    async def remove_executor(self, name: str, cause: str) -> None:
        """Remove all incarnations of that executor, also if they have not joined yet."""
        self._departed.add(name)
        for address in [each for each in self._joined if parse_process(each) == name]:
            await self.on_left(address, cause)

    async def _on_exit(self, incarnation: int, child: ChildProcess) -> None:
        await self.on_left(f"{child.name}/{incarnation}", describe_exit(child))

    def _is_fatal_exit(self, incarnation: int, child: ChildProcess) -> bool:
        """Return whether unusable input ended a first incarnation that never joined; later the machine can fail."""
        return incarnation == 1 and f"{child.name}/1" not in self._joined and child.process.returncode == EXIT_UNUSABLE

    async def _notify_rollouts(self, event: ExecutorJoined | ExecutorLeft) -> None:
        for rollout in self._rollouts:
            await self._bus.send(rollout, event)

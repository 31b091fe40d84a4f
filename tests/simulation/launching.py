"""A simulated launcher under a virtual clock.

The supervisor and the executor registry are real. The processes are asyncio tasks. Programs,
sessions, recipients of exit messages, and shutdown order match asterism.actors.launch.launcher.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from asterism.actors.launch.child_processes import ChildProcess
from asterism.actors.launch.executor_registry import ExecutorRegistry
from asterism.actors.launch.launcher import compute_link_epoch
from asterism.actors.launch.supervisor import Program, Supervisor
from asterism.actors.runtime.wiring import list_executors, list_generators
from asterism.bus import messages as msg
from asterism.bus.addresses import HEAD, LEARNER, ROLLOUT, parse_process
from asterism.bus.bus import Bus
from asterism.configs.schema.machines import SupervisionConfig
from asterism.configs.schema.run_config import RunConfig
from tests.simulation.processes import SimulatedChildren, SimulatedProcess

_NEVER_S = 1e9
_SETTINGS = SupervisionConfig(  # no heartbeat timeouts and practically unlimited restarts
    restarts=10_000,
    backoff_s=0.1,
    failure_reset_s=1e-6,
    heartbeat_s=_NEVER_S,
    heartbeat_timeout_s=3 * _NEVER_S,
    first_heartbeat_timeout_s=3 * _NEVER_S,
)

StartProcess = Callable[[str, int, int], SimulatedProcess]  # arguments: process name, incarnation number, session


class LaunchedChildren(SimulatedChildren):
    def __init__(self, begin: StartProcess) -> None:
        super().__init__(Path())
        self._start_process = begin

    def start_process(self, name: str, argv: Sequence[str]) -> SimulatedProcess:
        incarnation, session = argv
        return self._start_process(name, int(incarnation), int(session))

    async def kill(self, name: str) -> None:
        raise AssertionError(f"{name} did not end after Shutdown")


class Launch:
    """One launch of the run."""

    def __init__(self, run: RunConfig, bus: Bus, boot: int, begin: StartProcess, fail: Callable[[], None]) -> None:
        """`fail` ends the launch as an error of the launcher would."""
        self.bus, self.boot, self._fail = bus, boot, fail
        self.rescheduled: list[msg.CallsRescheduled] = []
        self._finished: asyncio.Future[msg.RunFinished] = asyncio.get_running_loop().create_future()
        self._following: asyncio.Future[None]
        self.children = LaunchedChildren(begin)
        self.executing = ExecutorRegistry(list_executors(run), (ROLLOUT,), bus, self._build_argv_with_epoch)
        working = {
            name: Program(partial(self._build_argv_with_epoch, name), on_exit=self._engine_left)
            for name in list_generators(run)
        }
        programs = {
            **self.executing.build_programs(),
            **{name: Program(self._build_argv) for name in (HEAD, ROLLOUT)},
            **working,
            LEARNER: Program(partial(self._build_argv_with_epoch, LEARNER)),
        }
        self.supervisor = Supervisor(programs, self.children, _SETTINGS)

    def _build_argv(self, incarnation: int) -> Sequence[str]:
        return str(incarnation), str(compute_link_epoch(self.boot))

    def _build_argv_with_epoch(self, name: str, incarnation: int) -> Sequence[str]:
        return str(incarnation), str(compute_link_epoch(self.boot, incarnation))

    async def _engine_left(self, incarnation: int, child: ChildProcess) -> None:
        left = msg.EngineLeft(child.name, f"{child.name} was killed", incarnation)
        for recipient in (f"{HEAD}/arbiter", f"{HEAD}/recipe", ROLLOUT):
            await self.bus.send(recipient, left)

    async def follow(self) -> msg.RunFinished:
        """Supervise the processes and return the RunFinished message.

        Message handling continues until `stop`.
        """
        self.supervisor.start()
        giving_up = asyncio.ensure_future(self.supervisor.wait_for_failure())
        self._following = asyncio.ensure_future(self._follow())
        try:
            events = [giving_up, self._following, self._finished]
            await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)
            if giving_up.done():
                giving_up.result()
            if self._following.done():
                self._following.result()
            return self._finished.result()
        finally:
            giving_up.cancel()

    async def _follow(self) -> None:
        while True:
            match (await self.bus.receive()).message:
                case msg.RunFinished() as finished:
                    self._finished.set_result(finished)
                case msg.RunFailed():
                    self._fail()
                case msg.ExecutorJoined() as event:
                    await self.executing.on_joined(event)
                case msg.ExecutorHealthy(executor=executor):
                    self.supervisor.mark_healthy(parse_process(executor))
                case msg.CallsRescheduled() as rescheduled:
                    self.rescheduled.append(rescheduled)
                case _:
                    pass

    async def stop(self) -> None:
        """Shut down all processes except the head, then the head."""
        await self.die()
        others = [name for name in self.children.names if name != HEAD]
        for names in (others, [HEAD]):
            for name in names:
                await self.bus.send(name, msg.Shutdown())
            for name in names:
                await self.children.kill_after(name, _NEVER_S)
        await self.bus.close()

    async def die(self) -> None:
        """Stop the supervisor and the message handling."""
        self._following.cancel()
        await self.supervisor.stop()

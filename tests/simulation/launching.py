"""The launcher's part under a virtual clock: the real supervisor and book of executors over processes that are tasks.

As actors.launcher: programs, sessions, who is told that an engine or an executor has left, and in which order all end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from actors.children import Child, Children
from actors.executors import Executors
from actors.launcher import session_of
from actors.supervisor import Program, Supervisor
from actors.wiring import HEAD, LEARNER, ROLLOUT, executors, generators
from bus.messages import CallsMoved, EngineLeft, ExecutorJoined, ExecutorProved, RunFinished, Shutdown
from bus.transport import Bus, process_of
from configs.run_folder import RunFolder
from configs.schema import Run, Supervision
from tests.simulation.processes import SimulatedProcess

_NEVER_S = 1e9
_SETTINGS = Supervision(  # nobody is silent here, and however often somebody dies, the run goes on
    restarts=10_000, backoff_s=0.1, settled_s=1e-6, heartbeat_s=_NEVER_S, silent_s=3 * _NEVER_S, start_s=3 * _NEVER_S
)

Begin = Callable[[str, int, int], SimulatedProcess]  # name, number of its life, session


class SimulatedChildren(Children):
    def __init__(self, begin: Begin) -> None:
        super().__init__(RunFolder(Path()))
        self._begin = begin

    async def spawn(self, name: str, argv: Sequence[str], environment: object) -> Child:
        life, session = argv
        child = Child(name, self._begin(name, int(life), int(session)), Path(name))  # pyright: ignore
        self._children[name] = child
        return child

    async def kill(self, name: str) -> None:
        raise AssertionError(f"{name} did not end when it was told to")


class Launch:
    """One launch of the run."""

    def __init__(self, run: Run, bus: Bus, boot: int, begin: Begin) -> None:
        self.bus, self.boot = bus, boot
        self.moved: list[CallsMoved] = []
        self._finished: asyncio.Future[RunFinished] = asyncio.get_running_loop().create_future()
        self._following: asyncio.Future[None]
        self.children = SimulatedChildren(begin)
        self.executing = Executors(executors(run), (ROLLOUT,), bus, self._anew)
        working = {name: Program(partial(self._anew, name), left=self._engine_left) for name in generators(run)}
        programs = {
            **self.executing.programs(),
            **{name: Program(self._again) for name in (HEAD, ROLLOUT)},
            **working,
            LEARNER: Program(partial(self._anew, LEARNER)),
        }
        self.supervisor = Supervisor(programs, self.children, _SETTINGS)

    def _again(self, life: int) -> Sequence[str]:
        return str(life), str(session_of(self.boot))

    def _anew(self, name: str, life: int) -> Sequence[str]:
        return str(life), str(session_of(self.boot, life))

    async def _engine_left(self, life: int, child: Child) -> None:
        left = EngineLeft(child.name, f"{child.name} was killed", life)
        for told in (f"{HEAD}/arbiter", f"{HEAD}/recipe", ROLLOUT):
            await self.bus.send(told, left)

    async def follow(self) -> RunFinished:
        """Until it hears that the run is finished; then it goes on listening until `stop`."""
        self.supervisor.start()
        giving_up = asyncio.ensure_future(self.supervisor.until_given_up())
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
                case RunFinished() as finished:
                    self._finished.set_result(finished)
                case ExecutorJoined() as event:
                    await self.executing.joined(event)
                case ExecutorProved(executor=executor):
                    self.supervisor.proved(process_of(executor))
                case CallsMoved() as moved:
                    self.moved.append(moved)
                case _:
                    pass

    async def stop(self) -> None:
        """All but the head at once; then the head."""
        await self.die()
        others = [name for name in self.children.names if name != HEAD]
        for names in (others, [HEAD]):
            for name in names:
                await self.bus.send(name, Shutdown())
            for name in names:
                await self.children.running(name).wait()
        await self.bus.close()

    async def die(self) -> None:
        """Nobody is started any more, and nothing is heard."""
        self._following.cancel()
        await self.supervisor.stop()

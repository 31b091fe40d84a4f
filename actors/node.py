"""A further node's launcher: joins a run, keeps this node's part of its processes alive, and ends them with the run.

It hears of the run from node 0 alone (actors.cluster). When node 0 has not been heard for `supervision.silent_s`, it has
given this node up, or is about to: the processes are ended, and the node may join again, as another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import shutil
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import structlog

from actors.children import Child, Children, last_words, threads
from actors.cluster import book_of
from actors.commands import Commands, Meeting
from actors.hosts import check_free, meeting_environment
from actors.refusal import Refusal
from actors.supervisor import Program, Supervisor
from actors.wiring import LAUNCHER, LEARNER, stops_within_s
from bus.book import Address, network_of, write_book, write_network
from bus.heartbeat import listening
from bus.messages import (
    ExecutorProved,
    LearnerWanted,
    Listener,
    NodeArrived,
    NodeBeat,
    NodeLeft,
    NodesChanged,
    NodeWelcomed,
    ProcessEnded,
    Shutdown,
)
from bus.structured_log import configure
from bus.transport import Bus, process_of
from bus.zeromq import zmq_bus
from configs.errors import UNUSABLE, UnusableInput
from configs.load import load_resolved
from configs.run_folder import RunFolder
from configs.schema import Run

Ending = Literal["over", "interrupted", "lost", "unheard"]
Say = Callable[[str], None]

_QUEUE_MESSAGES = 65_536
_ASK_S = 10.0  # without an answer for so long, it says that it waits


class Joining(NamedTuple):
    """What a node is, and what it would join."""

    at: Address  # where the run's launcher listens
    own: Address
    key: Path
    generators: int = -1  # as many as the run's configuration says
    executors: int = -1
    run_folder: Path | None = None  # where this node sees the run's folder, if not where node 0 does
    patience_s: float = 300.0  # so long it waits to be welcomed

    @property
    def own_folder(self) -> RunFolder:
        """Its sockets and memory are told from those of other nodes of the same machine."""
        return RunFolder(Path(), f"{self.own.of('control')} of {self.at.of('control')}")


class Directory:
    """Who listens where, as this node has been told."""

    def __init__(self, joining: Joining, name: str) -> None:
        self._sockets = joining.own_folder.sockets
        self._known = [
            Listener(LAUNCHER, 0, joining.at.host, joining.at.port),
            Listener(name, -1, joining.own.host, joining.own.port),
        ]
        self._gone: list[str] = []
        self._number = -1
        self._boot = 0
        self._write()
        write_network(self._sockets, joining.key)

    def welcomed(self, welcome: NodeWelcomed) -> None:
        self._number, self._boot, self._known = welcome.number, welcome.boot, list(welcome.listeners)
        self._write()

    def changed(self, change: NodesChanged) -> None:
        self._known = [each for each in (*self._known, *change.joined) if each.process not in change.gone]
        self._gone += change.gone
        self._write()

    def _write(self) -> None:
        write_book(self._sockets, book_of(self._number, self._known, self._gone, self._boot))


async def take_part(joining: Joining, say: Say, interrupted: asyncio.Event) -> Ending:
    """One membership, from the first word to the last. Raises UnusableInput and ProcessDied."""
    name = f"node@{secrets.token_hex(4)}"
    # A node that is there has the scratch folders that another one at this address would clear.
    check_free(joining.own.host, joining.own.port, "--host and --port say where to listen")
    with _scratch(joining.own_folder):
        directory = Directory(joining, name)
        bus = zmq_bus(name, joining.own_folder.sockets, _QUEUE_MESSAGES, 0, network_of(joining.own_folder.sockets))
        try:
            own = joining.own
            arrived = NodeArrived(name, own.host, own.port, joining.generators, joining.executors)
            await bus.send(LAUNCHER, arrived)
            welcome = await _until_welcome(bus, joining, say, interrupted)
            if welcome is None:
                return "interrupted" if interrupted.is_set() else "unheard"
            directory.welcomed(welcome)
            run, folder = _folder_of(welcome, joining)
            return await Membership(run, folder, welcome, bus, directory, joining.own.host).last(say, interrupted)
        finally:
            await bus.close()


@contextlib.contextmanager
def _scratch(folder: RunFolder) -> Generator[None]:
    both = (folder.sockets, folder.shared_memory)
    for path in both:
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(mode=0o700)
    try:
        yield
    finally:
        for path in both:
            shutil.rmtree(path, ignore_errors=True)


async def _until_welcome(bus: Bus, joining: Joining, say: Say, interrupted: asyncio.Event) -> NodeWelcomed | None:
    """None when it was interrupted, or has waited for as long as it may."""
    at, asked = joining.at.of("control"), asyncio.ensure_future(bus.receive())
    stop = asyncio.ensure_future(interrupted.wait())
    loop = asyncio.get_running_loop()
    until = loop.time() + joining.patience_s
    try:
        while not (asked.done() or stop.done()) and loop.time() < until:
            await asyncio.wait(
                (asked, stop), timeout=min(_ASK_S, until - loop.time()), return_when=asyncio.FIRST_COMPLETED
            )
            if not (asked.done() or stop.done()):
                say(f"no answer yet from {at}: nobody listens there, or not with the key in {joining.key}")
        if not asked.done():
            return None
        message = asked.result().message
        assert isinstance(message, NodeWelcomed), f"a node is told {type(message).__name__} before it is welcomed"
        return message
    finally:
        asked.cancel()
        stop.cancel()


def _folder_of(welcome: NodeWelcomed, joining: Joining) -> tuple[Run, RunFolder]:
    """The run's folder as this node sees it. Raises UnusableInput where it is not the run's."""
    folder = RunFolder(joining.run_folder or Path(welcome.run_folder), joining.own_folder.scratch)
    boot = folder.boots.read_text().strip() if folder.boots.exists() else ""
    if boot != str(welcome.boot):
        raise UnusableInput(
            f"{folder.path}: this is not the folder of the run at {joining.at.of('control')}; all nodes of a run see its "
            "folder, on a shared file system: --run-folder says where this node does"
        )
    return load_resolved(folder.config), folder


class Membership:
    """A node of the run, once it has been welcomed."""

    def __init__(
        self, run: Run, folder: RunFolder, welcome: NodeWelcomed, bus: Bus, directory: Directory, host: str
    ) -> None:
        self._run = run
        self._welcome = welcome
        self._bus = bus
        self._directory = directory
        self._host = host
        self._folder = folder
        self._commands = Commands(run, folder, welcome.boot)
        self._children = Children(folder)
        self._heard = asyncio.get_running_loop().time()
        self._ranks: asyncio.Task[None] | None = None
        self._refusal = Refusal()
        configure(folder, f"launcher@{welcome.number}", run.log.level, self._refusal.note)
        self._logger = structlog.get_logger()

    async def last(self, say: Say, interrupted: asyncio.Event) -> Ending:
        """Until the run is over, this node is told to end, or node 0 is silent. Raises ProcessDied and DiskRefused."""
        welcome = self._welcome
        processes = (*welcome.generators, *welcome.executors)
        say(f"node {welcome.number} of the run in {welcome.run_folder}: {', '.join(processes) or 'ready to train'}")
        self._logger.info("node.welcomed", node=welcome.number, boot=welcome.boot, processes=list(processes))
        programs = {name: self._program(name) for name in processes}
        supervisor = Supervisor(programs, self._children, self._run.supervision)
        supervisor.start()
        cause = "it failed"
        try:
            with listening(self._folder.sockets, supervisor.heard):
                ending = await self._until_an_end(supervisor, interrupted)
            cause = {"over": "the run is over", "interrupted": "it was told to end", "lost": "it heard nobody"}[ending]
        finally:
            await supervisor.stop()
            await self._end(cause)
        return ending

    def _program(self, name: str) -> Program:
        generates = name in self._welcome.generators
        return Program(
            partial(self._commands.process, name),
            self._run.engine.threads if generates else 1,
            forgiven=generates,
            starts_within_s=self._run.engine_starts_within_s,
            left=self._left,
            helpless=_helpless,
        )

    async def _until_an_end(
        self, supervisor: Supervisor, interrupted: asyncio.Event
    ) -> Literal["over", "interrupted", "lost"]:
        following = asyncio.ensure_future(self._follow(supervisor))
        silence = asyncio.ensure_future(self._until_silence())
        stopping = asyncio.ensure_future(interrupted.wait())
        ends = [following, silence, stopping, asyncio.ensure_future(self._refusal.wait())]
        if supervisor.names:
            ends.append(asyncio.ensure_future(supervisor.until_given_up()))
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for end in ends:
                if end.done():
                    end.result()
            return "interrupted" if stopping.done() else "over" if following.done() else "lost"
        finally:
            for end in ends:
                end.cancel()

    async def _follow(self, supervisor: Supervisor) -> None:
        """Until the run is over."""
        loop = asyncio.get_running_loop()
        while True:
            message = (await self._bus.receive()).message
            self._heard = loop.time()
            match message:
                case NodeBeat():
                    pass
                case NodesChanged() as change:
                    self._directory.changed(change)
                case LearnerWanted() as wanted:
                    await self._run_ranks(wanted)
                case ExecutorProved(executor=executor):
                    supervisor.proved(process_of(executor))
                case Shutdown():
                    return
                case other:
                    self._logger.error("message.misdirected", kind=type(other).__name__)

    async def _until_silence(self) -> None:
        loop, settings = asyncio.get_running_loop(), self._run.supervision
        watched = loop.time()
        while loop.time() - self._heard <= settings.silent_s:
            await self._bus.send(LAUNCHER, NodeBeat())
            await asyncio.sleep(settings.heartbeat_s)
            now = loop.time()
            if now - watched > 3 * settings.heartbeat_s:  # this process itself was held up
                self._heard = now
            watched = now
        self._logger.error("node.cut_off", silent_s=round(loop.time() - self._heard, 1))

    async def _left(self, life: int, child: Child) -> None:
        cause = f"{child.name} ended with exit code {child.process.returncode}"
        await self._bus.send(LAUNCHER, ProcessEnded(child.name, life, cause))

    # ---------------------------------------------------------------- ranks of the learner

    async def _run_ranks(self, wanted: LearnerWanted) -> None:
        name = f"{LEARNER}@{self._welcome.number}"
        if self._ranks is not None:
            self._ranks.cancel()
            await self._children.kill(name)
        meeting = Meeting(Address(wanted.host, wanted.port), wanted.node_rank, wanted.nodes)
        argv = self._commands.learner(wanted.step, wanted.life, meeting)
        environment = {**threads(self._run.learner.threads), **meeting_environment(self._host)}
        child = await self._children.spawn(name, argv, environment)
        self._ranks = asyncio.create_task(self._watch_ranks(child, wanted.life))

    async def _watch_ranks(self, child: Child, life: int) -> None:
        if await child.process.wait() != 0:
            self._logger.error("process.died", name=child.name, life=life, exit_code=child.process.returncode)
            cause = f"{child.name} ended with exit code {child.process.returncode}: {last_words(child, 1)}"
            await self._bus.send(LAUNCHER, ProcessEnded(child.name, life, cause))

    # ---------------------------------------------------------------- ending

    async def _end(self, cause: str) -> None:
        if self._ranks is not None:
            self._ranks.cancel()
        children, workers = self._children, (*self._welcome.generators, *self._welcome.executors)
        ending = [
            children.end(self._bus, name, stops_within_s(self._run, name))
            if name in workers
            else children.kill_after(name, stops_within_s(self._run, name))
            for name in children.names
        ]
        await asyncio.gather(*ending)
        await self._bus.send(LAUNCHER, NodeLeft(cause))
        self._logger.info("node.ended", node=self._welcome.number, cause=cause)


def _helpless(life: int, child: Child) -> bool:
    """What its first life could not use, no other one can."""
    return life == 1 and child.process.returncode == UNUSABLE

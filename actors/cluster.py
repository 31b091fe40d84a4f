"""The nodes that have joined a run, as its launcher sees them: who has come, what each runs, and who is gone.

A node is what one launcher keeps alive on one machine. The run's own launcher is on node 0; it numbers the others and
tells everybody where everybody listens (bus.book). A node that has not been heard for `supervision.silent_s` is gone for
good: its engines and executors have left, and nothing is sent to it any more. If it was only cut off, it finds the same,
ends what it runs, and joins again as another node.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence

import msgspec
import structlog

from actors.commands import MEETING_PORT, MEETINGS, WEIGHTS_PORT, Meeting, session_of
from actors.counters import count_one_more
from actors.display import Display
from actors.executors import Executors
from actors.wiring import LAUNCHER, WEIGHTS, executors, generators, tell_engine_left
from bus.book import Address, Book, Entry, write_book
from bus.messages import (
    ClusterMessage,
    EngineLeft,
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
from bus.transport import Bus, process_of
from configs.errors import UnusableInput
from configs.run_folder import RunFolder
from configs.schema import Run

PORTS = 100  # of a node, from its first one
_ALL_LIVES = 2**31 - 1


def listeners(node: int, host: str, port: int, launcher: str, processes: Sequence[str]) -> tuple[Listener, ...]:
    """A node's processes, each at two ports of its own, the first ones its launcher's. Raises UnusableInput."""
    names = (launcher, *processes)
    if 2 * len(names) > WEIGHTS_PORT:
        raise UnusableInput(
            f"a node listens at {PORTS} ports, enough for {WEIGHTS_PORT // 2 - 1} processes, "
            f"not for {len(processes)}; start a further node on this machine, with another --port"
        )
    return tuple(Listener(name, node, host, port + 2 * index) for index, name in enumerate(names))


def first_listeners(run: Run, processes: Sequence[str]) -> tuple[Listener, ...]:
    """Of node 0. Raises UnusableInput."""
    host, port = run.cluster.host, run.cluster.port
    return (*listeners(0, host, port, LAUNCHER, processes), Listener(WEIGHTS, 0, host, port + WEIGHTS_PORT))


def book_of(node: int, known: Sequence[Listener], gone: Sequence[str], boot: int) -> Book:
    """The copy of that node, in this launch of the run."""
    entries = {each.process: Entry(Address(each.host, each.port), each.node) for each in known}
    return Book(node, entries, list(gone), session_of(boot))


class Node(msgspec.Struct):
    number: int
    launcher: str
    host: str
    port: int
    generators: tuple[str, ...]
    executors: tuple[str, ...]
    heard: float  # when

    @property
    def processes(self) -> tuple[str, ...]:
        return (self.launcher, *self.generators, *self.executors)


class Cluster:
    def __init__(
        self,
        run: Run,
        folder: RunFolder,
        boot: int,
        bus: Bus,
        known: Sequence[Listener],
        executing: Executors,
        end_learner: Callable[[], Awaitable[None]],
        display: Display,
    ) -> None:
        """`known` are the processes of node 0. `end_learner` ends its learner, for a next life to begin."""
        self._run = run
        self._folder = folder
        self._boot = boot
        self._bus = bus
        self._known = list(known)
        self._gone: list[str] = []
        self._executing = executing
        self._end_learner = end_learner
        self._display = display
        self._nodes: dict[str, Node] = {}  # by their launchers
        self._changed = asyncio.Event()
        self._learner_life = 0
        self._trainers: tuple[str, ...] = ()  # launchers of the nodes that run ranks of it
        self._logger = structlog.get_logger()

    # ---------------------------------------------------------------- what nodes say

    async def take(self, sender: str, message: ClusterMessage | ExecutorProved) -> None:
        if isinstance(message, NodeArrived):
            await self._welcome(message)
            return
        if isinstance(message, ExecutorProved):
            await self._pass_on(message)
            return
        node = self._nodes.get(sender)
        if node is None:  # it is gone, and will find that nobody answers
            return
        node.heard = asyncio.get_running_loop().time()
        match message:
            case ProcessEnded():
                await self._ended(node, message)
            case NodeLeft(cause=cause):
                await self._lose(node, cause)
            case NodeBeat():
                pass
            case other:
                self._logger.error("message.misdirected", kind=type(other).__name__)

    async def _welcome(self, arrived: NodeArrived) -> None:
        for earlier in [
            node for node in self._nodes.values() if (node.host, node.port) == (arrived.host, arrived.port)
        ]:
            await self._lose(earlier, "another node listens where it did")
        number, run = self._next_number(), self._run
        node = Node(
            number,
            arrived.node,
            arrived.host,
            arrived.port,
            tuple(f"generator-{index}@{number}" for index in range(_given(arrived.generators, len(generators(run))))),
            tuple(f"executor-{index}@{number}" for index in range(_given(arrived.executors, len(executors(run))))),
            asyncio.get_running_loop().time(),
        )
        joined = listeners(number, node.host, node.port, node.launcher, node.processes[1:])
        self._known += joined
        self._write_book()
        for other in self._nodes.values():
            await self._bus.send(other.launcher, NodesChanged(joined, ()))
        self._nodes[node.launcher] = node
        path, known = str(self._folder.path.resolve()), tuple(self._known)
        welcome = NodeWelcomed(number, self._boot, path, node.generators, node.executors, known)
        await self._bus.send(node.launcher, welcome)
        self._logger.info("node.joined", node=number, host=node.host, port=node.port, processes=list(node.processes))
        self._say(node, f"has joined; generators: {len(node.generators)}, executors: {len(node.executors)}")
        self._changed.set()

    def _next_number(self) -> int:
        """One that no node had in an earlier launch either: such a node may not have ended yet."""
        return count_one_more(self._folder.nodes)

    async def _pass_on(self, proved: ExecutorProved) -> None:
        """To the launcher that keeps it alive."""
        executor = process_of(proved.executor)
        for node in self._nodes.values():
            if executor in node.executors:
                await self._bus.send(node.launcher, proved)

    async def _ended(self, node: Node, ended: ProcessEnded) -> None:
        self._logger.error(
            "node.process_died", node=node.number, name=ended.process, life=ended.life, cause=ended.cause
        )
        if ended.process in node.generators:
            await tell_engine_left(self._bus, EngineLeft(ended.process, ended.cause, ended.life))
        elif ended.process in node.executors:
            await self._executing.left(f"{ended.process}/{ended.life}", ended.cause)
        elif node.launcher in self._trainers and ended.life == self._learner_life:
            self._say(node, ended.cause)
            await self._end_learner()

    # ---------------------------------------------------------------- who is gone

    async def watch(self) -> None:
        """Until cancelled: beats for all nodes, and an ear for theirs."""
        loop, settings = asyncio.get_running_loop(), self._run.supervision
        watched = loop.time()
        while True:
            await asyncio.sleep(settings.heartbeat_s)
            now = loop.time()
            if now - watched > 3 * settings.heartbeat_s:  # this process itself was held up, and has heard nobody
                for node in self._nodes.values():
                    node.heard = now
            watched = now
            for node in list(self._nodes.values()):
                if now - node.heard > settings.silent_s:
                    await self._lose(node, f"not heard for {now - node.heard:.1f} s")
                else:
                    await self._bus.send(node.launcher, NodeBeat())

    async def _lose(self, node: Node, cause: str) -> None:
        if self._nodes.pop(node.launcher, None) is None:
            return
        self._known = [each for each in self._known if each.node != node.number]
        self._gone += node.processes
        self._write_book()
        self._logger.error("node.left", node=node.number, host=node.host, cause=cause)
        self._say(node, f"has left: {cause}")
        for other in self._nodes.values():
            await self._bus.send(other.launcher, NodesChanged((), node.processes))
        for engine in node.generators:
            await tell_engine_left(self._bus, EngineLeft(engine, f"node {node.number} left: {cause}", _ALL_LIVES))
        for executor in node.executors:
            await self._executing.all_left(executor, f"node {node.number} left: {cause}")
        if node.launcher in self._trainers:
            await self._end_learner()

    # ---------------------------------------------------------------- the learner's ranks

    async def until_learner_may_begin(self, step: int, life: int) -> Meeting | None:
        """Waits for as many nodes as the run begins with, and has those that train run their ranks. Later, and where no step
        is left, as many as train are enough: the others ended with the run, if it was killed after that.

        Where the ranks meet; None where node 0 alone has all of them.
        """
        settings = self._run.cluster
        begins = life == 1 and step < self._run.rl.steps
        await self._until_nodes(settings.nodes if begins else settings.learner_nodes)
        self._learner_life = life
        if settings.learner_nodes == 1:
            return None
        trainers = sorted(self._nodes.values(), key=lambda node: node.number)[: settings.learner_nodes - 1]
        self._trainers = tuple(node.launcher for node in trainers)
        own = next(each for each in self._known if each.process == LAUNCHER)
        at = Address(own.host, own.port + MEETING_PORT + life % MEETINGS)
        for rank, node in enumerate(trainers, 1):
            wanted = LearnerWanted(life, step, rank, settings.learner_nodes, at.host, at.port)
            await self._bus.send(node.launcher, wanted)
        return Meeting(at, 0, settings.learner_nodes)

    async def _until_nodes(self, needed: int) -> None:
        """Counting node 0."""
        if len(self._nodes) + 1 < needed:
            at = next(each for each in self._known if each.process == LAUNCHER)
            here = len(self._nodes) + 1
            self._display.say(
                f"waiting for nodes, {here} of {needed} are here: asterism join tcp://{at.host}:{at.port}"
            )
        while len(self._nodes) + 1 < needed:
            self._changed.clear()
            await self._changed.wait()

    # ---------------------------------------------------------------- ending

    async def end(self, seconds: float) -> None:
        """Has all nodes end their processes, and waits so long for them."""
        for launcher in self._nodes:
            await self._bus.send(launcher, Shutdown())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._nodes:
                    envelope = await self._bus.receive()
                    if isinstance(envelope.message, NodeLeft):
                        self._nodes.pop(envelope.sender, None)
        if self._nodes:
            self._logger.warning("nodes.left_behind", nodes=[node.number for node in self._nodes.values()])

    def _write_book(self) -> None:
        write_book(self._folder.sockets, book_of(0, self._known, self._gone, self._boot))

    def _say(self, node: Node, what: str) -> None:
        self._display.say(f"node {node.number} ({node.host}) {what}")


def _given(wanted: int, otherwise: int) -> int:
    return otherwise if wanted < 0 else wanted

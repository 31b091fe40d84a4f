"""Cluster membership on node 0 records the nodes that have joined, their processes, and the nodes that have left.

A node is one launcher with its processes on one machine. The launcher of node 0 numbers the others and sends all of them
the addresses of all processes (asterism.bus.transport.address_book). A node without a heartbeat for
`supervision.heartbeat_timeout_s` is removed for good: its engines and executors have left, and it gets no more messages.
A node that was only disconnected times out too, stops its processes, and joins again as a new node.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import NoReturn

import msgspec
import structlog

from asterism.actors.launch.claim_run_folder import increment_counter
from asterism.actors.launch.command_lines import (
    NUM_RENDEZVOUS_PORTS,
    RENDEZVOUS_PORT_OFFSET,
    WEIGHT_SERVER_PORT_OFFSET,
    Rendezvous,
    compute_link_epoch,
)
from asterism.actors.launch.display import Display
from asterism.actors.launch.executor_registry import ExecutorRegistry
from asterism.actors.runtime.wiring import list_executors, list_generators, send_engine_left
from asterism.bus.addresses import LAUNCHER, WEIGHT_SERVER, name_executor, name_generator, parse_process
from asterism.bus.bus import Bus
from asterism.bus.messages import (
    ClusterMessage,
    EngineLeft,
    ExecutorHealthy,
    JoinAccepted,
    JoinRequested,
    LearnerRanksRequested,
    Listener,
    MembershipChanged,
    NodeHeartbeat,
    NodeLeft,
    ProcessEnded,
    Shutdown,
)
from asterism.bus.process.waiting import SuspensionGuard
from asterism.bus.transport.address_book import AddressBook, AddressEntry, TcpAddress, write_address_book
from asterism.configs.errors import UnusableInput
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.run_config import RunConfig

PORTS_PER_NODE = 100  # number of ports, from the node's first port
_ALL_INCARNATIONS = 2**31 - 1


def assign_ports(
    node: int, host: str, first_port: int, launcher: str, processes: Sequence[str]
) -> tuple[Listener, ...]:
    """Assign two ports to each process of a node, beginning with its launcher. Raises UnusableInput."""
    names = (launcher, *processes)
    if 2 * len(names) > WEIGHT_SERVER_PORT_OFFSET:
        raise UnusableInput(
            f"a node has {PORTS_PER_NODE} ports, enough for {WEIGHT_SERVER_PORT_OFFSET // 2 - 1} processes, "
            f"not for {len(processes)}; start another node on this machine with another --port"
        )
    return tuple(Listener(name, node, host, first_port + 2 * index) for index, name in enumerate(names))


def assign_head_ports(run: RunConfig, processes: Sequence[str]) -> tuple[Listener, ...]:
    """Assign the ports of node 0. Raises UnusableInput."""
    host, port = run.cluster.host, run.cluster.port
    return (
        *assign_ports(0, host, port, LAUNCHER, processes),
        Listener(WEIGHT_SERVER, 0, host, port + WEIGHT_SERVER_PORT_OFFSET),
    )


def build_address_book(node: int, listeners: Sequence[Listener], departed: Sequence[str], launch: int) -> AddressBook:
    """Build the copy of the address book for `node`, in this launch of the run."""
    entries = {each.process: AddressEntry(TcpAddress(each.host, each.port), each.node) for each in listeners}
    return AddressBook(node, entries, list(departed), compute_link_epoch(launch))


class WorkerNode(msgspec.Struct):
    number: int
    launcher: str
    host: str
    port: int
    generators: tuple[str, ...]
    executors: tuple[str, ...]
    last_heartbeat_at: float

    @property
    def processes(self) -> tuple[str, ...]:
        return (self.launcher, *self.generators, *self.executors)


class ClusterMembership:
    def __init__(
        self,
        run: RunConfig,
        folder: RunFolder,
        launch: int,
        bus: Bus,
        listeners: Sequence[Listener],
        executor_registry: ExecutorRegistry,
        kill_learner: Callable[[], Awaitable[None]],
        display: Display,
    ) -> None:
        """`listeners`: the processes of node 0. `kill_learner` kills its learner, which is then restarted."""
        self._run = run
        self._folder = folder
        self._launch = launch
        self._bus = bus
        self._listeners = list(listeners)
        self._departed: list[str] = []
        self._executor_registry = executor_registry
        self._kill_learner = kill_learner
        self._display = display
        self._nodes: dict[str, WorkerNode] = {}  # nodes by name of their launcher
        self._node_joined = asyncio.Event()
        self._learner_incarnation = 0
        self._learner_launchers: tuple[str, ...] = ()  # launchers of the other nodes that run the learner's ranks
        self._logger = structlog.get_logger()

    # ---------------------------------------------------------------- messages of nodes

    async def handle_message(self, sender: str, message: ClusterMessage | ExecutorHealthy) -> None:
        if isinstance(message, JoinRequested):
            await self._accept_join(message)
            return
        if isinstance(message, ExecutorHealthy):
            await self._forward_executor_healthy(message)
            return
        node = self._nodes.get(sender)
        if node is None:  # the node was removed, and will time out
            return
        node.last_heartbeat_at = asyncio.get_running_loop().time()
        match message:
            case ProcessEnded():
                await self._handle_process_exit(node, message)
            case NodeLeft(cause=cause):
                await self._remove_node(node, cause)
            case NodeHeartbeat():
                pass
            case other:
                self._logger.error("message.misdirected", kind=type(other).__name__)

    async def _accept_join(self, request: JoinRequested) -> None:
        for earlier in list(self._nodes.values()):
            if (earlier.host, earlier.port) == (request.host, request.port):
                await self._remove_node(earlier, "a new node joined with its address")
        # A node of an earlier launch may still run, so its number is not reused.
        number = increment_counter(self._folder.node_counter)
        num_generators = _resolve_count(request.generators, len(list_generators(self._run)))
        num_executors = _resolve_count(request.executors, len(list_executors(self._run)))
        node = WorkerNode(
            *(number, request.node, request.host, request.port),
            tuple(name_generator(index, number) for index in range(num_generators)),
            tuple(name_executor(index, number) for index in range(num_executors)),
            asyncio.get_running_loop().time(),
        )
        joined = assign_ports(number, node.host, node.port, node.launcher, node.processes[1:])
        self._listeners += joined
        self._write_address_book()
        for other in self._nodes.values():
            await self._bus.send(other.launcher, MembershipChanged(joined, ()))
        self._nodes[node.launcher] = node
        path, listeners = str(self._folder.path.resolve()), tuple(self._listeners)
        accepted = JoinAccepted(number, self._launch, path, node.generators, node.executors, listeners)
        await self._bus.send(node.launcher, accepted)
        self._logger.info("node.joined", node=number, host=node.host, port=node.port, processes=list(node.processes))
        self._print_status(node, f"has joined; generators: {len(node.generators)}, executors: {len(node.executors)}")
        self._node_joined.set()

    async def _forward_executor_healthy(self, event: ExecutorHealthy) -> None:
        """Forward the event to the launcher that supervises this executor."""
        executor = parse_process(event.executor)
        for node in self._nodes.values():
            if executor in node.executors:
                await self._bus.send(node.launcher, event)

    async def _handle_process_exit(self, node: WorkerNode, event: ProcessEnded) -> None:
        self._logger.error(
            "node.process_died", node=node.number, name=event.process, incarnation=event.incarnation, cause=event.cause
        )
        if event.process in node.generators:
            await send_engine_left(self._bus, EngineLeft(event.process, event.cause, event.incarnation))
        elif event.process in node.executors:
            await self._executor_registry.on_left(f"{event.process}/{event.incarnation}", event.cause)
        elif node.launcher in self._learner_launchers and event.incarnation == self._learner_incarnation:
            self._print_status(node, event.cause)
            await self._kill_learner()

    # ---------------------------------------------------------------- departures

    async def monitor_heartbeats(self) -> NoReturn:
        """Send heartbeats to all nodes, and remove nodes without heartbeats, until cancelled."""
        loop, settings = asyncio.get_running_loop(), self._run.supervision
        guard = SuspensionGuard(settings.heartbeat_s)
        while True:
            await asyncio.sleep(settings.heartbeat_s)
            now = loop.time()
            if guard.check():
                for node in self._nodes.values():
                    node.last_heartbeat_at = now
            for node in list(self._nodes.values()):
                if now - node.last_heartbeat_at > settings.heartbeat_timeout_s:
                    await self._remove_node(node, f"no heartbeat for {now - node.last_heartbeat_at:.1f} s")
                else:
                    await self._bus.send(node.launcher, NodeHeartbeat())

    async def _remove_node(self, node: WorkerNode, cause: str) -> None:
        if self._nodes.pop(node.launcher, None) is None:
            return
        self._listeners = [each for each in self._listeners if each.node != node.number]
        self._departed += node.processes
        self._write_address_book()
        self._logger.error("node.left", node=node.number, host=node.host, cause=cause)
        self._print_status(node, f"has left: {cause}")
        for other in self._nodes.values():
            await self._bus.send(other.launcher, MembershipChanged((), node.processes))
        left = f"node {node.number} left: {cause}"
        for engine in node.generators:
            await send_engine_left(self._bus, EngineLeft(engine, left, _ALL_INCARNATIONS))
        for executor in node.executors:
            await self._executor_registry.remove_executor(executor, left)
        if node.launcher in self._learner_launchers:
            await self._kill_learner()

    # ---------------------------------------------------------------- the learner's ranks

    async def wait_for_learner_nodes(self, step: int, incarnation: int) -> Rendezvous | None:
        """Wait for the run's nodes and request learner ranks from the training ones. Return the ranks' rendezvous.

        A restart, or a resume without steps left, waits only for the training nodes: the other nodes may have ended
        with the run. Returns None if node 0 has all ranks.
        """
        settings = self._run.cluster
        is_initial_start = incarnation == 1 and step < self._run.rl.steps
        await self._wait_for_nodes(settings.nodes if is_initial_start else settings.learner_nodes)
        self._learner_incarnation = incarnation
        if settings.learner_nodes == 1:
            return None
        trainers = sorted(self._nodes.values(), key=lambda node: node.number)[: settings.learner_nodes - 1]
        self._learner_launchers = tuple(node.launcher for node in trainers)
        port = settings.port + RENDEZVOUS_PORT_OFFSET + incarnation % NUM_RENDEZVOUS_PORTS
        address = TcpAddress(settings.host, port)
        for rank, node in enumerate(trainers, 1):
            count = settings.learner_nodes
            request = LearnerRanksRequested(incarnation, step, rank, count, address.host, address.port)
            await self._bus.send(node.launcher, request)
        return Rendezvous(address, 0, settings.learner_nodes)

    async def _wait_for_nodes(self, needed: int) -> None:
        """Wait until `needed` nodes are present, node 0 included."""
        if len(self._nodes) + 1 < needed:
            here, at = len(self._nodes) + 1, f"tcp://{self._run.cluster.host}:{self._run.cluster.port}"
            self._display.print_line(f"waiting for nodes, {here} of {needed} have joined: asterism join {at}")
        while len(self._nodes) + 1 < needed:
            self._node_joined.clear()
            await self._node_joined.wait()

    # ---------------------------------------------------------------- ending

    async def shut_down(self, timeout_s: float) -> None:
        """Send Shutdown to all nodes and wait up to `timeout_s` until they have left."""
        for launcher in self._nodes:
            await self._bus.send(launcher, Shutdown())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._nodes:
                    envelope = await self._bus.receive()
                    if isinstance(envelope.message, NodeLeft):
                        self._nodes.pop(envelope.sender, None)
        if self._nodes:
            self._logger.warning("nodes.abandoned", nodes=[node.number for node in self._nodes.values()])

    def _write_address_book(self) -> None:
        write_address_book(self._folder.sockets, build_address_book(0, self._listeners, self._departed, self._launch))

    def _print_status(self, node: WorkerNode, text: str) -> None:
        self._display.print_line(f"node {node.number} ({node.host}) {text}")


def _resolve_count(requested: int, default: int) -> int:
    return default if requested < 0 else requested

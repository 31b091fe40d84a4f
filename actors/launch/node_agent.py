"""The node agent is the launcher of nodes 1 and up: it joins a run, supervises its processes here, and stops them.

It exchanges messages only with node 0 (asterism.actors.launch.membership). After `supervision.heartbeat_timeout_s` without a
message from node 0, which removes this node after the same time, the agent stops its processes; it can then join again
as a new node.
"""

import asyncio
import secrets
from functools import partial
from typing import Literal

import structlog

from asterism.actors.launch.child_processes import ChildProcess, ChildProcesses, build_thread_environment, describe_exit
from asterism.actors.launch.claim_run_folder import scratch_folders
from asterism.actors.launch.command_lines import CommandLines, Rendezvous, list_heartbeat_senders
from asterism.actors.launch.heartbeat_watch import HeartbeatWatch
from asterism.actors.launch.host_address import build_rendezvous_environment, check_port_free
from asterism.actors.launch.join_handshake import JoinOptions, PrintLine, open_run_folder, request_join
from asterism.actors.launch.launcher import LogWriteFailure, wait_for_interrupt
from asterism.actors.launch.membership import build_address_book
from asterism.actors.launch.supervisor import Program, Supervisor
from asterism.actors.runtime.wiring import get_stop_timeout_s
from asterism.bus.addresses import LAUNCHER, LEARNER, parse_process
from asterism.bus.bus import Bus
from asterism.bus.messages import (
    ExecutorHealthy,
    JoinAccepted,
    LearnerRanksRequested,
    Listener,
    MembershipChanged,
    NodeHeartbeat,
    NodeLeft,
    ProcessEnded,
    Shutdown,
)
from asterism.bus.process.exit_reason import exit_reason_path, read_exit_reason
from asterism.bus.process.heartbeat import Heartbeat, receiving_heartbeats
from asterism.bus.process.structured_log import configure_logging
from asterism.bus.process.waiting import SuspensionGuard, wait_for_first
from asterism.bus.transport.address_book import TcpAddress, load_network, write_address_book, write_key_location
from asterism.bus.transport.zeromq import open_zmq_bus
from asterism.configs.errors import EXIT_UNUSABLE
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.run_config import RunConfig

NodeEnding = Literal["over", "interrupted", "lost", "unanswered"]

_QUEUE_MESSAGES = 65_536


class NodeAddressBook:
    """Addresses of all processes, as node 0 sent them to this node."""

    def __init__(self, options: JoinOptions, name: str) -> None:
        self._sockets = options.own_folder.sockets
        self._listeners = [
            Listener(LAUNCHER, 0, options.head_address.host, options.head_address.port),
            Listener(name, -1, options.own_address.host, options.own_address.port),
        ]
        self._departed: list[str] = []
        self._node_number = -1
        self._launch = 0
        self._write_address_book()
        write_key_location(self._sockets, options.key_file)

    def on_join_accepted(self, accepted: JoinAccepted) -> None:
        self._node_number, self._launch = accepted.node_number, accepted.launch
        self._listeners = list(accepted.listeners)
        self._write_address_book()

    def on_membership_changed(self, change: MembershipChanged) -> None:
        self._listeners = [each for each in (*self._listeners, *change.joined) if each.process not in change.departed]
        self._departed += change.departed
        self._write_address_book()

    def _write_address_book(self) -> None:
        write_address_book(
            self._sockets, build_address_book(self._node_number, self._listeners, self._departed, self._launch)
        )


async def join_once(options: JoinOptions, print_line: PrintLine, interrupted: asyncio.Event) -> NodeEnding:
    """Join the run and take part until this membership ends. Raises UnusableInput and ProcessDied."""
    name = f"node@{secrets.token_hex(4)}"
    # This check comes first: a running node at this address uses the scratch folders that are cleared below.
    check_port_free(options.own_address.host, options.own_address.port, "set another address with --host and --port")
    with scratch_folders(options.own_folder):
        address_book = NodeAddressBook(options, name)
        bus = open_zmq_bus(
            name, options.own_folder.sockets, _QUEUE_MESSAGES, 0, load_network(options.own_folder.sockets)
        )
        try:
            accepted = await request_join(name, bus, options, print_line, interrupted)
            if accepted is None:
                return "interrupted" if interrupted.is_set() else "unanswered"
            address_book.on_join_accepted(accepted)
            run, folder = open_run_folder(accepted, options)
            return await NodeAgent(run, folder, accepted, bus, address_book, options.own_address.host).run_until_end(
                print_line, interrupted
            )
        finally:
            await bus.close()


class NodeAgent:
    """A node of the run after its join was accepted."""

    def __init__(
        self,
        run: RunConfig,
        folder: RunFolder,
        accepted: JoinAccepted,
        bus: Bus,
        address_book: NodeAddressBook,
        host: str,
    ) -> None:
        self._run = run
        self._accepted = accepted
        self._bus = bus
        self._address_book = address_book
        self._host = host
        self._folder = folder
        self._command_lines = CommandLines(run, folder, accepted.launch)
        self._children = ChildProcesses(folder)
        self._last_message_at = asyncio.get_running_loop().time()
        self._learner_ranks_task: asyncio.Task[None] | None = None
        self._learner_ranks_watch: HeartbeatWatch | None = None
        self._log_failure = LogWriteFailure()
        configure_logging(folder, f"{LAUNCHER}@{accepted.node_number}", run.log.level, self._log_failure.record)
        self._logger = structlog.get_logger()

    async def run_until_end(self, print_line: PrintLine, interrupted: asyncio.Event) -> NodeEnding:
        """Run until the run ends, the node is interrupted, or node 0 times out. Raises ProcessDied and DiskError."""
        accepted = self._accepted
        processes = (*accepted.generators, *accepted.executors)
        print_line(
            f"node {accepted.node_number} of the run in {accepted.run_folder}: {', '.join(processes) or 'ready to train'}"
        )
        self._logger.info(
            "node.join_accepted", node=accepted.node_number, launch=accepted.launch, processes=list(processes)
        )
        programs = {name: self._build_program(name) for name in processes}
        supervisor = Supervisor(programs, self._children, self._run.supervision, print_line)
        supervisor.start()

        def on_heartbeat(heartbeat: Heartbeat) -> None:
            supervisor.on_heartbeat(heartbeat)
            if self._learner_ranks_watch is not None:
                self._learner_ranks_watch.on_heartbeat(heartbeat)

        cause = "the node failed"
        try:
            with receiving_heartbeats(self._folder.sockets, on_heartbeat):
                ending = await self._wait_for_ending(supervisor, interrupted)
            cause = {"over": "the run is over", "interrupted": "interrupted", "lost": "no message from node 0"}[ending]
        finally:
            await supervisor.stop()
            await self._shut_down(cause)
        return ending

    def _build_program(self, name: str) -> Program:
        generates = name in self._accepted.generators
        return Program(
            partial(self._command_lines.build_worker_argv, name),
            self._run.engine.threads if generates else 1,
            resets_failures=generates,
            startup_allowance_s=self._run.servers.startup_timeout_s,
            on_exit=self._on_exit,
            is_fatal_exit=_is_fatal_exit,
        )

    async def _wait_for_ending(
        self, supervisor: Supervisor, interrupted: asyncio.Event
    ) -> Literal["over", "interrupted", "lost"]:
        return await wait_for_first(
            *((supervisor.wait_for_failure(),) if supervisor.names else ()),
            self._log_failure.wait(),
            wait_for_interrupt(interrupted),
            self._receive_messages(supervisor),
            self._send_heartbeats_until_timeout(),
        )

    async def _receive_messages(self, supervisor: Supervisor) -> Literal["over"]:
        """Handle messages until node 0 sends Shutdown."""
        loop = asyncio.get_running_loop()
        while True:
            message = (await self._bus.receive()).message
            self._last_message_at = loop.time()
            match message:
                case NodeHeartbeat():
                    pass
                case MembershipChanged() as change:
                    self._address_book.on_membership_changed(change)
                case LearnerRanksRequested() as request:
                    await self._start_learner_ranks(request)
                case ExecutorHealthy(executor=executor):
                    supervisor.mark_healthy(parse_process(executor))
                case Shutdown():
                    return "over"
                case other:
                    self._logger.error("message.misdirected", kind=type(other).__name__)

    async def _send_heartbeats_until_timeout(self) -> Literal["lost"]:
        loop, settings = asyncio.get_running_loop(), self._run.supervision
        guard = SuspensionGuard(settings.heartbeat_s)
        while loop.time() - self._last_message_at <= settings.heartbeat_timeout_s:
            await self._bus.send(LAUNCHER, NodeHeartbeat())
            await asyncio.sleep(settings.heartbeat_s)
            if guard.check():
                self._last_message_at = loop.time()
        self._logger.error("node.disconnected", silent_s=round(loop.time() - self._last_message_at, 1))
        return "lost"

    async def _on_exit(self, incarnation: int, child: ChildProcess) -> None:
        await self._bus.send(LAUNCHER, ProcessEnded(child.name, incarnation, describe_exit(child)))

    # ---------------------------------------------------------------- ranks of the learner

    async def _start_learner_ranks(self, request: LearnerRanksRequested) -> None:
        name = f"{LEARNER}@{self._accepted.node_number}"
        if self._learner_ranks_task is not None:
            self._learner_ranks_task.cancel()
            await self._children.kill(name)
        rendezvous = Rendezvous(TcpAddress(request.host, request.port), request.node_rank, request.num_nodes)
        argv = self._command_lines.build_learner_argv(request.step, request.incarnation, rendezvous)
        environment = {
            **build_thread_environment(self._run.learner.threads),
            **build_rendezvous_environment(self._host),
        }
        senders = list_heartbeat_senders(self._run.learner.ranks, request.node_rank, request.num_nodes)
        watch = self._children.watch_heartbeats(senders, request.incarnation, self._run.supervision)
        self._learner_ranks_watch = watch
        reason_path = exit_reason_path(self._folder, LEARNER)  # the ranks use the name without a node
        reason_path.unlink(missing_ok=True)
        child = (await self._children.spawn(name, argv, environment))._replace(exit_reason_path=reason_path)
        self._learner_ranks_task = asyncio.create_task(self._watch_learner_ranks(child, request.incarnation, watch))

    async def _watch_learner_ranks(self, child: ChildProcess, incarnation: int, watch: HeartbeatWatch) -> None:
        """Kill ranks that hang. Report a failure, so that node 0 restarts the ranks of all nodes."""
        hang = await watch.wait_for_exit(child.process)
        if hang is not None:
            await self._children.kill_hung(child.name, hang)
        if child.process.returncode != 0:
            self._logger.error(
                "process.died", name=child.name, incarnation=incarnation, exit_code=child.process.returncode
            )
            reason = hang.cause if hang else read_exit_reason(child.output_path, child.exit_reason_path, 1)
            await self._bus.send(LAUNCHER, ProcessEnded(child.name, incarnation, f"{describe_exit(child)}: {reason}"))

    # ---------------------------------------------------------------- ending

    async def _shut_down(self, cause: str) -> None:
        if self._learner_ranks_task is not None:
            self._learner_ranks_task.cancel()
        children, on_bus = self._children, (*self._accepted.generators, *self._accepted.executors)
        ending = [
            children.shut_down(self._bus, name, get_stop_timeout_s(self._run, name))
            if name in on_bus
            else children.kill_after(name, get_stop_timeout_s(self._run, name))
            for name in children.names
        ]
        await asyncio.gather(*ending)
        await self._bus.send(LAUNCHER, NodeLeft(cause))
        self._logger.info("node.ended", node=self._accepted.node_number, cause=cause)


def _is_fatal_exit(incarnation: int, child: ChildProcess) -> bool:
    """Return whether the exit ends the run: input that the first incarnation cannot use stays unusable."""
    return incarnation == 1 and child.process.returncode == EXIT_UNUSABLE

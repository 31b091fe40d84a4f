"""`asterism sandbox serve` runs one executor for several clients, isolated from each other.

    client -> ClientGateway -> Executor -> GuardedSandbox -> sandbox, and the results back

Clients are processes of the same user, and none of their messages ends the service: the gateway drops messages that a
client may not send, such as Shutdown, and an exception during a request fails only this request.

Bounds: `max_clients`; the requests of MAX_REFUSED_CLIENTS further clients fail, and packets of all others are dropped.
Further bounds: MAX_NOTEBOOKS per client with MAX_CELL_BYTES in total, MAX_REQUEST_BYTES per message, and MAX_REFUSALS
unsent failures. A client that has closed its sockets is removed, with its notebooks.
"""

import asyncio
import re
import resource
import sys
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

import structlog
import uvloop
from msgspec.structs import replace
from rich.console import Console

from asterism.actors.executor import Executor
from asterism.actors.sandbox_service.sandbox_client import (
    MAX_REQUEST_BYTES,
    SERVED_ADDRESS,
    check_private_folder,
    is_listening,
    is_served,
)
from asterism.bus.bus import Bus, Delivery
from asterism.bus.codec import decode
from asterism.bus.lanes import LANES
from asterism.bus.messages import (
    AnswerGraded,
    AnswerSubmitted,
    AnyMessage,
    CallFailed,
    CodeFinished,
    CodeRequested,
    Envelope,
    SessionEnded,
    SessionRestored,
)
from asterism.bus.process.waiting import make_interrupt_event, start_task, wait_for_first
from asterism.bus.transport.zeromq import get_socket_path, open_zmq_bus
from asterism.configs.errors import UnusableInput
from asterism.configs.schema.run_config import RunConfig
from asterism.policies.rollout.trajectory import GRADING_CALL
from asterism.sandbox.contract import CodeResult, Grade, Isolation, Sandbox, SandboxFailure
from asterism.sandbox.select_backend import make_sandbox

MAX_CLIENTS = 1024
MAX_REFUSED_CLIENTS = 64
MAX_NOTEBOOKS = 16_384
MAX_CELL_BYTES = 64 << 20  # limit of the code of a client's cells, from which the server builds its notebooks again
MAX_REFUSALS = 1024
_MAX_FOLDER_CHARACTERS = 84  # the path of a socket has at most 107 characters
_CLIENT_NAME = re.compile(r"client-[0-9]{1,10}")
_CLIENT_CHECK_S = 2.0
_DESCRIPTORS_PER_CLIENT, _OTHER_DESCRIPTORS = 8, 512
# Trajectory numbers are signed or unsigned 64-bit integers; each client's numbers get a range. The low 64 bits, which
# seed the generators of a call, stay the same.
_RANGE = 1 << 65
_LOWEST = -(1 << 63)

Request = CodeRequested | AnswerSubmitted | SessionRestored | SessionEnded


def serve_sandbox(run: RunConfig, folder: Path, console: Console) -> None:
    """Serve until ^C, SIGTERM or SIGHUP. Raises UnusableInput for a folder that cannot be used."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    check_private_folder(folder)
    if len(str(folder.resolve())) > _MAX_FOLDER_CHARACTERS:
        raise UnusableInput(f"--at {folder}: too long for a socket; use a path below 85 characters")
    if is_served(folder):
        raise UnusableInput(f"--at {folder}: a sandbox is served there already")
    uvloop.run(_serve(run, folder, console, _raise_client_limit()))


def _raise_client_limit() -> int:
    """Raise the limit of open files, and return the number of clients that it allows."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    allowed = MAX_CLIENTS if most == resource.RLIM_INFINITY else (most - _OTHER_DESCRIPTORS) // _DESCRIPTORS_PER_CLIENT
    return max(1, min(MAX_CLIENTS, allowed))


async def _serve(run: RunConfig, folder: Path, console: Console, max_clients: int) -> None:
    clients = ClientTable(folder, max_clients)
    bus = open_zmq_bus(
        *(SERVED_ADDRESS, folder, run.bus.queue_messages),
        accepts_peer=clients.accept,
        max_packet_bytes=MAX_REQUEST_BYTES + (2 << 20),  # a packet has up to 1 MiB before its last frame
    )
    gateway = ClientGateway(bus, clients)
    sandbox = GuardedSandbox(make_sandbox(run.sandbox, run.seed, run.name, run.acceptance))
    executor = Executor(gateway, sandbox, max_calls=run.sandbox.max_queued_calls)
    interrupted = make_interrupt_event()
    console.print(f"serving in {folder}; stop with Ctrl-C", markup=False, soft_wrap=True)
    try:
        await wait_for_first(executor.run(), gateway.watch_clients(), interrupted.wait())
    finally:
        await bus.close()
        for lane in LANES:
            get_socket_path(folder, SERVED_ADDRESS, lane).unlink(missing_ok=True)


class _ServedClient:
    def __init__(self, number: int) -> None:
        self.number = number  # 0 for a refused client
        self.epoch = -1  # epoch of the client's links; another process of the same name has a higher one
        self.notebooks: dict[int, int] = {}  # bytes of the kept cells, by the client's number of the trajectory
        self.unusable: set[int] = set()  # trajectories without kept cells
        self._cell_bytes = 0

    def add_cells(self, message: SessionRestored | CodeRequested) -> str | None:
        """Count the cells of the message; return the cause if one of the client's bounds does not permit them."""
        trajectory_id = message.trajectory_id
        if trajectory_id not in self.notebooks and len(self.notebooks) >= MAX_NOTEBOOKS:
            return f"this client has {MAX_NOTEBOOKS} notebooks already; end one"
        if isinstance(message, SessionRestored):
            self.end_notebook(trajectory_id)
            codes = [cell.code for cell in message.cells]
        else:
            codes = [message.code]
        added = sum(map(sys.getsizeof, codes))
        self.notebooks.setdefault(trajectory_id, 0)
        if trajectory_id in self.unusable or self._cell_bytes + added > MAX_CELL_BYTES:
            self.unusable.add(trajectory_id)  # until the notebook ends or is restored: it lacks these cells
            return f"the cells of this client's notebooks have more than {MAX_CELL_BYTES >> 20} MiB; end notebooks"
        self.notebooks[trajectory_id] += added
        self._cell_bytes += added
        return None

    def end_notebook(self, trajectory_id: int) -> None:
        self._cell_bytes -= self.notebooks.pop(trajectory_id, 0)
        self.unusable.discard(trajectory_id)

    def to_server(self, trajectory_id: int) -> int:
        return self.number * _RANGE + trajectory_id


class ClientTable:
    """Clients by name: processes of this user that listen in the folder."""

    def __init__(self, folder: Path, max_clients: int = MAX_CLIENTS) -> None:
        self._folder = folder
        self.max_clients = max_clients
        self._clients: dict[str, _ServedClient] = {}
        self._num_accepted = 0  # number of clients accepted so far

    def accept(self, name: str) -> bool:
        """Return whether packets of this process are accepted; add a new client."""
        if name in self._clients:
            return True
        if not _CLIENT_NAME.fullmatch(name) or not self._is_alive(name):
            return False
        num_refused = sum(not client.number for client in self._clients.values())
        if len(self._clients) - num_refused < self.max_clients:
            self._num_accepted += 1
            self._clients[name] = _ServedClient(self._num_accepted)
        elif num_refused < MAX_REFUSED_CLIENTS:
            self._clients[name] = _ServedClient(0)
        return name in self._clients

    def get(self, name: str) -> _ServedClient | None:
        return self._clients.get(name)

    def replace_earlier(self, name: str, epoch: int) -> _ServedClient | None:
        """Remove and return the earlier client of this name, if the message's epoch shows another process."""
        client = self._clients.get(name)
        if client is None:
            return None
        if client.epoch in (-1, epoch):
            client.epoch = epoch
            return None
        self._num_accepted += 1
        new = self._clients[name] = _ServedClient(self._num_accepted if client.number else 0)
        new.epoch = epoch
        return client

    def remove_ended(self) -> dict[str, _ServedClient]:
        """Remove and return the clients that have closed their sockets, and delete the files of killed ones."""
        ended = {name: self._clients.pop(name) for name in list(self._clients) if not self._is_alive(name)}
        for name in ended:
            for lane in LANES:
                get_socket_path(self._folder, name, lane).unlink(missing_ok=True)
        return ended

    def _is_alive(self, name: str) -> bool:
        return is_listening(get_socket_path(self._folder, name))


class ClientGateway:
    """The executor's channel to all clients. Implements asterism.actors.runtime.worker_loop.MessageChannel."""

    def __init__(self, bus: Bus, clients: ClientTable) -> None:
        self._bus = bus
        self._clients = clients
        self._ended_notebooks = deque[int]()  # notebooks of clients that have ended, by the server's numbers
        self._refusals: set[asyncio.Task[None]] = set()
        self._logger = structlog.get_logger()

    @property
    def process(self) -> str:
        return self._bus.process

    async def receive(self) -> Envelope:
        """Receive a message. Raises MalformedFrame after dropping the frame."""
        while not self._ended_notebooks:
            delivery = await self._bus.receive_delivery()
            self._bus.acknowledge(delivery)
            if (earlier := self._clients.replace_earlier(delivery.sender, delivery.epoch)) is not None:
                self._bus.drop_unacknowledged(delivery.sender)
                await self._end_notebooks(earlier)
            if delivery.sender == self.process:  # such a message only wakes this loop
                continue
            if (envelope := self._check(delivery, decode(delivery.frame))) is not None:
                return envelope
        return Envelope(self.process, self.process, SessionEnded(self._ended_notebooks.popleft()))

    def _check(self, delivery: Delivery, envelope: Envelope) -> Envelope | None:
        """Return the message for the executor, with the server's number of its trajectory, or None if it is refused."""
        client, message = self._clients.get(delivery.sender), envelope.message
        if client is None or not isinstance(message, Request) or envelope.sender != delivery.sender:
            self._logger.error("message.refused", client=delivery.sender, kind=type(message).__name__)
            return None
        if (cause := self._find_refusal(client, message)) is not None:
            self._refuse(delivery.sender, message, cause)
            return None
        return Envelope(
            delivery.sender, envelope.to, replace(message, trajectory_id=client.to_server(message.trajectory_id))
        )

    def _find_refusal(self, client: _ServedClient, message: Request) -> str | None:
        if not client.number:
            return (
                f"the sandbox server has {self._clients.max_clients} clients already; end one, or start another server"
            )
        if isinstance(message, SessionEnded):
            client.end_notebook(message.trajectory_id)
        elif isinstance(message, SessionRestored) or (
            isinstance(message, CodeRequested) and message.tool == "jupyter_code"
        ):
            return client.add_cells(message)
        return None

    def _refuse(self, name: str, message: Request, cause: str) -> None:
        match message:
            case CodeRequested(trajectory_id=trajectory_id, call=call):
                answer = CallFailed(trajectory_id, call, cause, self.process)
            case AnswerSubmitted(trajectory_id=trajectory_id):
                answer = CallFailed(trajectory_id, GRADING_CALL, cause, self.process)
            case SessionRestored() | SessionEnded():
                return
        self._logger.error("request.refused", client=name, cause=cause)
        if len(self._refusals) < MAX_REFUSALS:  # a client that reads no answers must not block the others
            start_task(self._refusals, self._bus.send(name, answer))

    async def send(self, to: str, message: AnyMessage) -> None:
        if isinstance(message, CodeFinished | AnswerGraded | CallFailed):
            number, trajectory_id = divmod(message.trajectory_id - _LOWEST, _RANGE)
            client = self._clients.get(to)
            if client is not None and client.number == number:  # otherwise the client has ended
                await self._bus.send(to, replace(message, trajectory_id=trajectory_id + _LOWEST))

    async def watch_clients(self) -> NoReturn:
        """Remove clients that have ended, and end their notebooks."""
        while True:
            await asyncio.sleep(_CLIENT_CHECK_S)
            await self.forget_ended_clients()

    async def forget_ended_clients(self) -> None:
        for name, client in self._clients.remove_ended().items():
            self._bus.forget_peer(name)
            await self._end_notebooks(client)

    async def _end_notebooks(self, client: _ServedClient) -> None:
        self._ended_notebooks.extend(map(client.to_server, client.notebooks))
        await self._bus.send(self.process, SessionEnded(0))


class GuardedSandbox:
    """A sandbox in which an exception fails only its own request. Implements asterism.sandbox.contract.Sandbox."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._logger = structlog.get_logger()

    async def start(self) -> Isolation:
        return await self._sandbox.start()

    async def run(self, call: CodeRequested) -> CodeResult:
        with self._failing():
            return await self._sandbox.run(call)

    async def grade(self, submission: AnswerSubmitted) -> Grade:
        with self._failing():
            return await self._sandbox.grade(submission)

    async def wait_until_broken(self) -> NoReturn:
        await self._sandbox.wait_until_broken()

    def restore_notebook(self, trajectory_id: int, cells: Sequence[CodeRequested]) -> None:
        with suppress(SandboxFailure), self._failing():
            self._sandbox.restore_notebook(trajectory_id, cells)

    async def end_notebook(self, trajectory_id: int) -> None:
        with suppress(SandboxFailure), self._failing():
            await self._sandbox.end_notebook(trajectory_id)

    async def close(self) -> None:
        await self._sandbox.close()

    @contextmanager
    def _failing(self) -> Generator[None]:
        """Log an exception and raise SandboxFailure instead."""
        try:
            yield
        except SandboxFailure:
            raise
        except Exception as error:
            self._logger.exception("request.failed")
            raise SandboxFailure(f"{type(error).__name__} in the sandbox server") from error

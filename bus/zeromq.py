"""Transport over ZeroMQ: every process binds one ROUTER and opens one DEALER to each process that it sends to.

The sockets are drained on their file descriptors by the event loop itself, many frames a wake-up: ready-made asyncio
sockets take a future a frame and reach a quarter of the rate.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from pathlib import Path

import zmq

from bus.transport import Bus, Inbox

_LINGER_MS = 500  # how long closing waits for frames that are not yet written
_RECONNECT_MS = 20
_READ_AT_ONCE = 256  # frames taken in one turn of the loop, so that other callbacks get theirs


def zmq_bus(process: str, sockets: Path, queue_messages: int) -> Bus:
    """A bus between processes of one machine; `sockets` is the folder that holds their ipc sockets.

    Must be called from within a running event loop.
    """
    inbox = Inbox(queue_messages)
    return Bus(process, inbox, ZmqTransport(process, sockets, inbox))


class ZmqTransport:
    def __init__(self, process: str, sockets: Path, inbox: Inbox) -> None:
        self._process = process
        self._sockets = sockets
        self._inbox = inbox
        self._context = zmq.Context()
        self._loop = asyncio.get_running_loop()
        self._dealers: dict[str, zmq.Socket[bytes]] = {}
        self._writing: defaultdict[str, asyncio.Lock] = defaultdict(
            asyncio.Lock
        )  # one waits at a time, the others queue
        self._router = self._socket(zmq.ROUTER)
        self._router.bind(self._endpoint(process))
        inbox.when_drained = self._read
        self._loop.add_reader(self._router.fileno(), self._read)
        self._loop.call_soon(self._read)

    def _endpoint(self, process: str) -> str:
        return f"ipc://{self._sockets / process}"

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.set_hwm(self._inbox.bound)
        socket.setsockopt(zmq.LINGER, _LINGER_MS)
        socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        return socket

    def _read(self) -> None:
        """Take what has arrived. The descriptor reports a change only once, so nothing may be left behind unasked for."""
        if self._router.closed:
            return
        for _ in range(_READ_AT_ONCE):
            if self._inbox.full:
                return  # the inbox calls again when it is half empty
            try:
                _identity, frame = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._inbox.put(frame)
        self._loop.call_soon(self._read)

    async def send_frame(self, process: str, frame: bytes) -> None:
        dealer = self._dealers.get(process)
        if dealer is None:  # without an identity: a process that comes back must not be taken for the one that died
            dealer = self._dealers[process] = self._socket(zmq.DEALER)
            dealer.connect(self._endpoint(process))
        async with self._writing[process]:
            while not _sent(dealer, frame):
                await self._until_writable(dealer)

    async def _until_writable(self, dealer: zmq.Socket[bytes]) -> None:
        changed = asyncio.Event()
        self._loop.add_reader(dealer.fileno(), changed.set)
        try:
            while not dealer.getsockopt(zmq.EVENTS) & zmq.POLLOUT:  # pyright: ignore[reportOperatorIssue]
                changed.clear()
                await changed.wait()
        finally:
            self._loop.remove_reader(dealer.fileno())

    async def close(self) -> None:
        """Waits up to half a second for what is not yet written."""
        if self._router.closed:
            return
        self._loop.remove_reader(self._router.fileno())
        for dealer in self._dealers.values():
            dealer.close()
        self._router.close()
        await self._loop.run_in_executor(None, self._context.term)


def _sent(dealer: zmq.Socket[bytes], frame: bytes) -> bool:
    """Whether there was room for the frame."""
    try:
        dealer.send(frame, zmq.NOBLOCK)
    except zmq.Again:
        return False
    return True

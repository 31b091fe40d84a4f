"""Fetches new weights from the learner's node into this node's shared memory, once per node.

The first generator of the node takes the slot's lock and downloads; the others then find the weights in the slot. The
download goes to a temporary file, which is renamed to the slot when it is complete: a process that is killed during the
download leaves no invalid slot, and the kernel releases its lock.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import structlog
import zmq
from msgspec.structs import replace

from asterism.bus.messages import WeightsPublished
from asterism.bus.transport.curve_auth import ClusterKey, secure_client_socket
from asterism.engine.contract import WeightsRefused
from asterism.engine.weight_transfer.adapter_slots import read_base
from asterism.engine.weight_transfer.file_lock import wait_for_lock
from asterism.engine.weight_transfer.slot_file import (
    CHUNK_BYTES,
    WINDOW_CHUNKS,
    ChunkRequest,
    build_header,
    compute_file_bytes,
    count_digest_chunks,
    digest_table,
    encode_request,
    get_body_offset,
    get_chunk_table,
    get_slot_path,
    has_weights,
    write_chunk_digest,
)

ANSWER_TIMEOUT_S = 10.0  # a connection is closed after this time without an answer
_MIN_CHUNK_BYTES = 16 * 2**10
_BACKOFF_S, _MAX_BACKOFF_S = 0.1, 5.0  # wait between connections; doubled after each connection without data
_STOP_POLL_S = 0.1  # interval of checks of the stop event
_RECONNECT_MS, _RECONNECT_MAX_MS = 50, 2_000
_FAST_ANSWER_FRACTION = 1 / 8  # an answer is fast within this share of the timeout
_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED

Socket = zmq.Socket[bytes]


class WeightsFetcher:
    def __init__(
        self,
        folder: Path,
        host: str,
        port: int,
        key: ClusterKey,
        chunk_bytes: int = CHUNK_BYTES,
        answer_timeout_s: float = ANSWER_TIMEOUT_S,
        *,
        has_base: bool = False,
    ) -> None:
        """`folder`: this node's generators share it, and the learner does not write to it. host, port: of the server.

        `has_base`: adapters are published; their base is fetched too, if this node does not have it.
        """
        self._folder = folder
        self._endpoint = f"tcp://{host}:{port}"
        self._key = key
        self._chunk_bytes = chunk_bytes
        self._answer_timeout_s = answer_timeout_s
        self._has_base = has_base

    async def fetch(self, published: WeightsPublished) -> WeightsPublished:
        """Return the same weights, in a slot of this node.

        Retries without limit while the link is slow or down. Raises WeightsRefused if the server no longer has these
        weights, and OSError if this node's memory is full.
        """
        stop = threading.Event()
        fetching = asyncio.ensure_future(asyncio.to_thread(self._fetch_slots, published, stop))
        try:
            slot = await asyncio.shield(fetching)
        except asyncio.CancelledError:
            stop.set()
            await asyncio.wait((fetching,))  # the thread polls `stop`
            fetching.exception()  # asyncio logs an exception that is never retrieved
            raise
        return replace(published, path=str(slot))

    def _fetch_slots(self, published: WeightsPublished, stop: threading.Event) -> Path:
        """Fetch the slots in a thread. After `stop` the result is meaningless."""
        slot = self._fetch_slot(published, stop)
        if self._has_base and not stop.is_set():
            adapters = replace(published, path=str(slot))
            self._fetch_slot(read_base(adapters).locate(adapters), stop)
        return slot

    def _fetch_slot(self, published: WeightsPublished, stop: threading.Event) -> Path:
        number = _get_slot_number(published)
        slot = get_slot_path(self._folder, number)
        with _locked(slot.with_suffix(".lock"), stop):
            if not stop.is_set() and not has_weights(slot, published):
                slot.unlink(missing_ok=True)  # free the memory of an older version, which the learner has overwritten
                self._download(published, slot, number, stop)
        return slot

    def _download(self, published: WeightsPublished, slot: Path, number: int, stop: threading.Event) -> None:
        part = slot.with_suffix(".part")
        size = compute_file_bytes(published.num_bytes)
        try:
            with part.open("w+b", buffering=0) as file:
                os.posix_fallocate(file.fileno(), 0, size)  # raises an error early if the memory is full
                transfer = _WeightsDownload(published, number, file.fileno(), self._chunk_bytes)
                if self._download_with_retries(transfer, stop):
                    _complete_slot(file.fileno(), published)
                    part.replace(slot)
        finally:
            part.unlink(missing_ok=True)

    def _download_with_retries(self, transfer: _WeightsDownload, stop: threading.Event) -> bool:
        """Reconnect until the download is complete; return False if it was stopped before."""
        backoff_s = _BACKOFF_S
        while not transfer.is_complete and not stop.is_set():
            before = transfer.received_bytes
            try:
                with WeightConnection(self._endpoint, self._key, self._answer_timeout_s, stop) as connection:
                    transfer.resume(connection)
            except ConnectionBroken as broken:
                if stop.is_set():
                    break
                if transfer.received_bytes == before and broken.was_connected:
                    transfer.shrink_chunks()
                backoff_s = _BACKOFF_S if transfer.received_bytes > before else min(2 * backoff_s, _MAX_BACKOFF_S)
                structlog.get_logger().warning(
                    "weights.interrupted",
                    version=transfer.version,
                    done_bytes=transfer.received_bytes,
                    cause=str(broken),
                )
                stop.wait(backoff_s)
        return transfer.is_complete


class _WeightsDownload:
    """Downloads one version into a file, over several connections if necessary.

    Chunks are requested in order, WINDOW_CHUNKS at a time. Outstanding requests of a broken connection are repeated.
    """

    def __init__(self, published: WeightsPublished, slot: int, file: int, chunk_bytes: int) -> None:
        self.version = published.version
        self._published = published
        self._slot = slot
        self._file = file
        self._chunk_bytes = self._max_chunk_bytes = chunk_bytes
        self._next_offset = 0  # offset of the next request
        self._outstanding: dict[bytes, ChunkRequest] = {}  # requests by frame, in order

    @property
    def received_bytes(self) -> int:
        """Return the number of bytes received without a gap from the start."""
        return next((request.offset for request in self._outstanding.values()), self._next_offset)

    @property
    def is_complete(self) -> bool:
        return self.received_bytes == self._published.num_bytes

    def shrink_chunks(self) -> None:
        """Shrink the chunks for a slow link, on which a chunk of the current size always times out."""
        self._chunk_bytes = max(self._chunk_bytes // 4, min(_MIN_CHUNK_BYTES, self._max_chunk_bytes))

    def resume(self, connection: WeightConnection) -> None:
        """Download the rest. Raises ConnectionBroken, and WeightsRefused if the server does not have the weights."""
        self._next_offset = self.received_bytes
        self._outstanding.clear()
        while not self.is_complete:
            while len(self._outstanding) < WINDOW_CHUNKS and self._next_offset < self._published.num_bytes:
                self._request_chunk(connection)
            self._receive_chunk(*connection.receive())
            if connection.is_fast:
                self._chunk_bytes = min(2 * self._chunk_bytes, self._max_chunk_bytes)

    def _request_chunk(self, connection: WeightConnection) -> None:
        length = min(self._chunk_bytes, self._published.num_bytes - self._next_offset)
        request = ChunkRequest(self._slot, self.version, self._published.digest, self._next_offset, length)
        frame = encode_request(request)
        self._outstanding[frame] = request
        self._next_offset += length
        connection.send(frame)

    def _receive_chunk(self, frame: bytes, chunk: zmq.Frame | None) -> None:
        request = self._outstanding[frame]
        if chunk is None:
            raise WeightsRefused(f"the server no longer has weights of version {self.version}")
        if len(chunk) != request.length:
            raise WeightsRefused(f"the server sent {len(chunk)} bytes instead of {request.length}")
        _pwrite_all(self._file, chunk.buffer, get_body_offset(self._published.num_bytes) + request.offset)
        del self._outstanding[frame]


def _complete_slot(file: int, published: WeightsPublished) -> None:
    """Write the chunk table and the header. Raises WeightsRefused if the received bytes have another digest."""
    with mmap.mmap(file, 0) as slot, memoryview(slot) as content:
        for number in range(count_digest_chunks(published.num_bytes)):
            write_chunk_digest(content, published.num_bytes, number)
        with get_chunk_table(content, published.num_bytes) as table:
            digest = digest_table(table, published.num_bytes)
    if digest != published.digest:
        raise WeightsRefused(f"the received weights of version {published.version} are damaged")
    os.pwrite(file, build_header(published).pack(), 0)


def _pwrite_all(file: int, content: memoryview, offset: int) -> None:
    while content:
        written = os.pwrite(file, content, offset)
        content, offset = content[written:], offset + written


def _get_slot_number(published: WeightsPublished) -> int:
    try:
        return int(Path(published.path).name.removeprefix("slot_"))
    except ValueError:
        raise WeightsRefused(f"{published.path} is not the name of a slot") from None


@contextmanager
def _locked(path: Path, stop: threading.Event) -> Generator[None]:
    """Hold a lock, which the kernel releases if the process dies. After `stop` the body runs without the lock."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with path.open("ab") as file:
        wait_for_lock(file.fileno(), stop)
        yield


class ConnectionBroken(Exception):
    """The connection is unusable; retry with another. `str(error)` is the cause."""

    def __init__(self, cause: str, was_connected: bool) -> None:
        super().__init__(cause)
        self.was_connected = was_connected  # whether the handshake had succeeded


class WeightConnection:
    def __init__(self, endpoint: str, key: ClusterKey, answer_timeout_s: float, stop: threading.Event) -> None:
        """Connect; retry an unreachable server for `answer_timeout_s`."""
        self.is_fast = False  # whether the last answer took less than _FAST_ANSWER_FRACTION of the timeout
        self._answer_timeout_s = answer_timeout_s
        self._stop = stop
        self._connected = False
        self._context = zmq.Context[Socket]()
        self._socket: Socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
        secure_client_socket(self._socket, key)
        self._monitor: Socket = self._socket.get_monitor_socket(_EVENTS)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._socket.connect(endpoint)

    def __enter__(self) -> WeightConnection:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()
        self._context.term()

    def send(self, request: bytes) -> None:
        self._socket.send(request)

    def receive(self) -> tuple[bytes, zmq.Frame | None]:
        """Receive an answer: its request's frame, and the bytes if the server has them. Raises ConnectionBroken."""
        began = time.monotonic()
        while not self._stop.is_set():
            if time.monotonic() - began > self._answer_timeout_s:
                raise ConnectionBroken(f"no answer for {self._answer_timeout_s} s", self._connected)
            ready = dict(self._poller.poll(int(1000 * _STOP_POLL_S)))
            if self._socket in ready:
                self.is_fast = time.monotonic() - began < _FAST_ANSWER_FRACTION * self._answer_timeout_s
                request, *chunk = self._socket.recv_multipart(copy=False)
                return request.bytes, chunk[0] if chunk else None
            if self._monitor in ready:
                self._handle_monitor_event()
        raise ConnectionBroken("stopped", self._connected)

    def _handle_monitor_event(self) -> None:
        event = int.from_bytes(self._monitor.recv_multipart()[0][:2], "little")
        if event == zmq.EVENT_DISCONNECTED:
            raise ConnectionBroken("disconnected", self._connected)
        self._connected = True

"""How new weights come to a node where the learner is not: once, into this node's shared memory, over one connection.

Whichever generator of the node is told first takes the slot's lock and fetches; those that come later find the weights
there. What has come is written to a file of another name, which becomes the slot when it is whole: a process that is
killed meanwhile leaves nothing that could be taken for weights, and its lock is free.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import structlog
import zmq
from msgspec.structs import replace

from bus.curve import ClusterKey
from bus.messages import WeightsPublished
from engine.contract import WeightsRefused
from engine.weight_chunks import CHUNK_BYTES, WINDOW_CHUNKS, ChunkWanted, encode_question
from engine.weight_connection import Broken, WeightConnection
from engine.weight_slots import HEADER_BYTES, header_of, holds, number_of, slot_path

SILENT_S = 10.0  # without an answer for so long, a connection is given up
_MIN_CHUNK_BYTES = 16 * 2**10
_PAUSE_S, _MAX_PAUSE_S = 0.1, 5.0  # between two connections; doubled as long as nothing comes
_LOCKED_S = 0.05  # between two looks whether a lock is free: the kernel's waiting could not be broken off


class WeightsFetcher:
    def __init__(
        self,
        folder: Path,
        host: str,
        port: int,
        key: ClusterKey,
        chunk_bytes: int = CHUNK_BYTES,
        silent_s: float = SILENT_S,
    ) -> None:
        """`folder` is this node's, shared by its generators; not the one that the learner writes to. The weights' server
        is at host and port."""
        self._folder = folder
        self._endpoint = f"tcp://{host}:{port}"
        self._key = key
        self._chunk_bytes = chunk_bytes
        self._silent_s = silent_s

    async def nearby(self, published: WeightsPublished) -> WeightsPublished:
        """The same weights, where this node can read them.

        Waits for them however long the link is slow, or down. Raises WeightsRefused if they are not there any more,
        OSError if this node has no room for them.
        """
        stop = threading.Event()
        bringing = asyncio.ensure_future(asyncio.to_thread(self._bring, published, stop))
        try:
            slot = await asyncio.shield(bringing)
        except asyncio.CancelledError:
            stop.set()
            await asyncio.wait((bringing,))  # it looks at `stop` every few milliseconds, and then holds nothing
            bringing.exception()  # is nobody's any more
            raise
        return replace(published, path=str(slot))

    def _bring(self, published: WeightsPublished, stop: threading.Event) -> Path:
        """In a thread. What it returns once it is told to stop is nobody's."""
        number = _slot_number(published)
        slot = slot_path(self._folder, number)
        with _locked(slot.with_suffix(".lock"), stop):
            if not stop.is_set() and not holds(slot, published):
                slot.unlink(missing_ok=True)  # the learner has overwritten it too; its room is needed
                self._fetch(published, slot, number, stop)
        return slot

    def _fetch(self, published: WeightsPublished, slot: Path, number: int, stop: threading.Event) -> None:
        part = slot.with_suffix(".part")
        size = HEADER_BYTES + published.num_bytes
        try:
            with part.open("wb", buffering=0) as file:
                os.posix_fallocate(file.fileno(), 0, size)  # a full memory is an error here, not after half of the way
                transfer = _Transfer(published, number, file.fileno(), self._chunk_bytes)
                if self._complete(transfer, stop):
                    os.pwrite(file.fileno(), header_of(published).packed(), 0)
                    part.replace(slot)
        finally:
            part.unlink(missing_ok=True)

    def _complete(self, transfer: _Transfer, stop: threading.Event) -> bool:
        """One connection after the other, until all is there; False if it was told to stop before."""
        pause_s = _PAUSE_S
        while not transfer.is_complete and not stop.is_set():
            before = transfer.done
            try:
                with WeightConnection(self._endpoint, self._key, self._silent_s, stop) as connection:
                    transfer.go_on(connection)
            except Broken as broken:
                if stop.is_set():
                    break
                if transfer.done == before and broken.was_connected:
                    transfer.ask_for_less()
                pause_s = _PAUSE_S if transfer.done > before else min(2 * pause_s, _MAX_PAUSE_S)
                structlog.get_logger().warning(
                    "weights.interrupted", version=transfer.version, done_bytes=transfer.done, cause=str(broken)
                )
                stop.wait(pause_s)
        return transfer.is_complete


class _Transfer:
    """One version's way into a file, over as many connections as it takes. Chunks are asked for in order, several at
    once; what a connection still owed when it broke is asked for again."""

    def __init__(self, published: WeightsPublished, slot: int, file: int, chunk_bytes: int) -> None:
        self.version = published.version
        self._published = published
        self._slot = slot
        self._file = file
        self._chunk_bytes = self._max_chunk_bytes = chunk_bytes
        self._asked = 0  # all before that was asked for
        self._owed: dict[bytes, ChunkWanted] = {}  # by the question, in order

    @property
    def done(self) -> int:
        """So many bytes from the beginning are there."""
        return next((wanted.offset for wanted in self._owed.values()), self._asked)

    @property
    def is_complete(self) -> bool:
        return self.done == self._published.num_bytes

    def ask_for_less(self) -> None:
        """A chunk that a slow link does not bring in time would never come."""
        self._chunk_bytes = max(self._chunk_bytes // 4, min(_MIN_CHUNK_BYTES, self._max_chunk_bytes))

    def go_on(self, connection: WeightConnection) -> None:
        """Until all is there. Raises Broken, and WeightsRefused if the server does not have it."""
        self._asked = self.done
        self._owed.clear()
        while not self.is_complete:
            while len(self._owed) < WINDOW_CHUNKS and self._asked < self._published.num_bytes:
                self._ask(connection)
            self._take(*connection.receive())
            if connection.is_brisk:
                self._chunk_bytes = min(2 * self._chunk_bytes, self._max_chunk_bytes)

    def _ask(self, connection: WeightConnection) -> None:
        length = min(self._chunk_bytes, self._published.num_bytes - self._asked)
        wanted = ChunkWanted(self._slot, self.version, self._published.digest, self._asked, length)
        question = encode_question(wanted)
        self._owed[question] = wanted
        self._asked += length
        connection.send(question)

    def _take(self, question: bytes, chunk: zmq.Frame | None) -> None:
        wanted = self._owed[question]
        if chunk is None:
            raise WeightsRefused(f"the server does not have weights of version {self.version} any more")
        if len(chunk) != wanted.length:
            raise WeightsRefused(f"the server gave {len(chunk)} bytes for {wanted.length}")
        _write(self._file, chunk.buffer, HEADER_BYTES + wanted.offset)
        del self._owed[question]


def _write(file: int, content: memoryview, offset: int) -> None:
    while content:
        written = os.pwrite(file, content, offset)
        content, offset = content[written:], offset + written


def _slot_number(published: WeightsPublished) -> int:
    try:
        return number_of(Path(published.path))
    except ValueError:
        raise WeightsRefused(f"{published.path} is no slot's name") from None


@contextmanager
def _locked(path: Path, stop: threading.Event) -> Generator[None]:
    """Whoever dies with the lock gives it back. Told to stop, it is entered without it."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with path.open("ab") as file:
        while not stop.is_set():
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                stop.wait(_LOCKED_S)
        yield

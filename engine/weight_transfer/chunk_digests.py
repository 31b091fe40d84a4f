"""Computes digests of the chunks of a slot by several threads: XXH3 releases Python's lock while it hashes a chunk."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import TypeVar

import torch

from asterism.engine.weight_transfer.slot_file import (
    DIGEST_CHUNK_BYTES,
    count_digest_chunks,
    has_chunk_digest,
    write_chunk_digest,
)

Result = TypeVar("Result")

MAX_THREADS = 8  # more threads do not help: memory limits the rate


def count_threads(processes: int = 1) -> int:
    """Return the number of threads of each of the `processes` that compute digests at the same time."""
    return max(1, min(MAX_THREADS, len(os.sched_getaffinity(0)) // processes))


def count_device_threads(device: torch.device, processes: int = 1) -> int:
    """Return the number of threads of a learner or engine on this device.

    One thread computes digests on a CPU, because the other threads run the model.
    """
    return count_threads(processes) if device.type == "cuda" else 1


def write_digests(slot: memoryview, num_bytes: int, numbers: Sequence[int], threads: int) -> None:
    """Write the digests of these chunks into the table of the slot."""
    _map_chunks(partial(write_chunk_digest, slot, num_bytes), numbers, threads)


def find_damaged_chunk(slot: memoryview, num_bytes: int, threads: int) -> int | None:
    """Find the first chunk of the parameters that does not match the chunk table; None if all match."""
    numbers = range(count_digest_chunks(num_bytes))
    matches = _map_chunks(partial(has_chunk_digest, slot, num_bytes), numbers, threads)
    return next((number for number, is_equal in zip(numbers, matches, strict=True) if not is_equal), None)


def _map_chunks(function: Callable[[int], Result], numbers: Sequence[int], threads: int) -> list[Result]:
    """Call the function for each chunk, in threads unless there is a single chunk."""
    if min(len(numbers), threads) <= 1:
        return [function(number) for number in numbers]
    with ThreadPoolExecutor(min(len(numbers), threads)) as pool:
        return list(pool.map(function, numbers))


class RunningDigests:
    """Writes the digests of complete chunks while later chunks are copied. The context ends when all are written."""

    def __init__(self, slot: memoryview, num_bytes: int, threads: int) -> None:
        self._slot, self._num_bytes, self._num_chunks = slot, num_bytes, count_digest_chunks(num_bytes)
        threads = min(threads, self._num_chunks)
        self._pool = ThreadPoolExecutor(threads) if threads > 1 else None  # None: the writing thread digests
        self._next = 0  # number of the next chunk to digest
        self._futures: list[Future[None]] = []

    def __enter__(self) -> RunningDigests:
        return self

    def advance(self, end: int, wait: Callable[[], object] | None = None) -> None:
        """Declare all bytes of the parameters up to `end` written once `wait`, run in another thread, returns."""
        complete = self._num_chunks if end == self._num_bytes else end // DIGEST_CHUNK_BYTES
        for number in range(self._next, complete):
            if self._pool is None:
                self._digest(number, wait)
            else:
                self._futures.append(self._pool.submit(self._digest, number, wait))
        self._next = max(self._next, complete)

    def _digest(self, number: int, wait: Callable[[], object] | None) -> None:
        if wait is not None:
            wait()
        write_chunk_digest(self._slot, self._num_bytes, number)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Raise the error of a thread."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=error is not None)
        if error is None:
            for future in self._futures:
                future.result()
            assert self._next == self._num_chunks, f"{self._next} of {self._num_chunks} chunks are complete"

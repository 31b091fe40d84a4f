"""Which page of the KV cache holds what, and for whom: the books, without the memory.

A page holds the keys and values of `page_tokens` consecutive tokens. Several sequences may hold one page: a full page
is found again by the digest of all tokens up to its end, so that equal prefixes lie in the cache once. A page that no
sequence holds is free, and found no more.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray


class PagePool:
    """Pages are numbered from 0. `used` and `cached` are exact after every call."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._holders = [0] * num_pages  # sequences that hold the page
        self._runners = [0] * num_pages  # those of them that run
        self._digest: list[bytes | None] = [None] * num_pages
        self._found: dict[bytes, int] = {}  # page by digest
        self._idle = 0  # pages with holders and without runners

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.num_pages - len(self._free)

    @property
    def cached(self) -> int:
        """Pages that only parked sequences hold."""
        return self._idle

    # ------------------------------------------------------------ for one sequence, which runs

    def take(self) -> int:
        """A free page for a running sequence. IndexError if there is none: see `free`."""
        page = self._free.pop()
        self._holders[page] = self._runners[page] = 1
        return page

    def find(self, digest: bytes) -> int | None:
        return self._found.get(digest)

    def share(self, page: int) -> None:
        """One more running sequence holds the page."""
        self._holders[page] += 1
        self._run(page)

    def publish(self, page: int, digest: bytes) -> None:
        """The page is full and may be found. The first of two equal pages stays the one that is found."""
        if self._digest[page] is None and digest not in self._found:
            self._digest[page] = digest
            self._found[digest] = page

    def is_private(self, page: int) -> bool:
        """Whether its holder may overwrite it: nobody else holds it or may find it."""
        return self._holders[page] == 1 and self._digest[page] is None

    def release(self, pages: Iterable[int], *, running: bool) -> list[int]:
        """One sequence holds these pages no more. Those that are free now."""
        return [page for page in pages if self._release(page, running)]

    def park(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._runners[page] -= 1
            self._idle += self._runners[page] == 0

    def resume(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._run(page)

    # ------------------------------------------------------------ for all

    def conceal(self) -> None:
        """No page of now will be found again: the weights that computed them are gone."""
        self._found.clear()
        self._digest = [None] * self.num_pages

    def _run(self, page: int) -> None:
        self._idle -= self._runners[page] == 0
        self._runners[page] += 1

    def _release(self, page: int, running: bool) -> bool:
        self._holders[page] -= 1
        if running:
            self._runners[page] -= 1
            self._idle += self._runners[page] == 0 and self._holders[page] > 0
        elif self._holders[page] == 0:
            self._idle -= 1
        if self._holders[page] > 0:
            return False
        digest, self._digest[page] = self._digest[page], None
        if digest is not None:
            del self._found[digest]
        self._free.append(page)
        return True


def digests(token_ids: NDArray[np.int32], page_tokens: int) -> list[bytes]:
    """Of every full page: a hash of it and of all before it."""
    chained = hashlib.blake2b(digest_size=16)
    found: list[bytes] = []
    for end in range(page_tokens, len(token_ids) + 1, page_tokens):
        chained.update(token_ids[end - page_tokens : end].tobytes())
        found.append(chained.digest())
    return found

"""Reference counts and prefix index of the KV cache's pages, without their memory.

A page holds the keys and values of `page_tokens` consecutive tokens. Several sequences may hold the same page: the index
maps the digest of all tokens up to the end of a full page to the page, so that equal prefixes are cached once. A page
that no sequence holds is free, and not in the index.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray


class PagePool:
    """Pages are numbered from 0. The counts are exact after every call."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._ref_counts = [0] * num_pages  # sequences that hold the page
        self._running_ref_counts = [0] * num_pages  # running sequences that hold the page
        self._digests: list[bytes | None] = [None] * num_pages
        self._page_by_digest: dict[bytes, int] = {}
        self._num_idle = 0  # pages that only idle sequences hold

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_pages - len(self._free)

    @property
    def num_cached(self) -> int:
        """Pages that only idle sequences hold."""
        return self._num_idle

    # ------------------------------------------------------------ for one sequence

    def allocate(self) -> int:
        """A free page for a running sequence. Raises IndexError if num_free is 0."""
        page = self._free.pop()
        self._ref_counts[page] = self._running_ref_counts[page] = 1
        return page

    def find(self, digest: bytes) -> int | None:
        return self._page_by_digest.get(digest)

    def share(self, page: int) -> None:
        """One more running sequence holds the page."""
        self._ref_counts[page] += 1
        self._add_running_ref(page)

    def register_full_page(self, page: int, digest: bytes) -> None:
        """Add a full page to the index. Of two equal pages the first stays in the index."""
        if self._digests[page] is None and digest not in self._page_by_digest:
            self._digests[page] = digest
            self._page_by_digest[digest] = page

    def is_private(self, page: int) -> bool:
        """Whether its holder may overwrite it: no other sequence holds it, and it is not in the index."""
        return self._ref_counts[page] == 1 and self._digests[page] is None

    def release(self, pages: Iterable[int], *, running: bool) -> list[int]:
        """Remove one sequence's reference to these pages; returns the pages that are now free."""
        return [page for page in pages if self._release_page(page, running)]

    def mark_idle(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._running_ref_counts[page] -= 1
            self._num_idle += self._running_ref_counts[page] == 0

    def mark_running(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._add_running_ref(page)

    # ------------------------------------------------------------ for all sequences

    def clear_prefix_index(self) -> None:
        """Make all existing pages unfindable: older weights computed them."""
        self._page_by_digest.clear()
        self._digests = [None] * self.num_pages

    def _add_running_ref(self, page: int) -> None:
        self._num_idle -= self._running_ref_counts[page] == 0
        self._running_ref_counts[page] += 1

    def _release_page(self, page: int, running: bool) -> bool:
        self._ref_counts[page] -= 1
        if running:
            self._running_ref_counts[page] -= 1
            self._num_idle += self._running_ref_counts[page] == 0 and self._ref_counts[page] > 0
        elif self._ref_counts[page] == 0:
            self._num_idle -= 1
        if self._ref_counts[page] > 0:
            return False
        digest, self._digests[page] = self._digests[page], None
        if digest is not None:
            del self._page_by_digest[digest]
        self._free.append(page)
        return True


def compute_page_digests(token_ids: NDArray[np.int32], page_tokens: int) -> list[bytes]:
    """For every full page a hash of all tokens up to its end."""
    chained = hashlib.blake2b(digest_size=16)
    found: list[bytes] = []
    for end in range(page_tokens, len(token_ids) + 1, page_tokens):
        chained.update(token_ids[end - page_tokens : end].tobytes())
        found.append(chained.digest())
    return found

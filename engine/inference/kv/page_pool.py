"""The reference counts and the prefix index of the KV cache's pages, without their memory.

A page contains the keys and values of `page_tokens` consecutive tokens. Several sequences can hold the same page: the
index maps the digest of all tokens up to the end of a full page to the page, so that equal prefixes are cached once. A
page without a holder is free and not in the index.
"""

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from asterism.engine.inference.sequence import Sequence


@dataclass(slots=True)
class _SharedPage:
    num_holders: int
    num_running: int  # number of running holders


class PagePool:
    """A pool of pages, numbered from 0. The counts are exact after every call."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.num_cached = 0  # number of pages that only idle sequences hold
        self._free = list(range(num_pages - 1, -1, -1))
        self._shared: dict[int, _SharedPage] = {}  # pages that have had two holders; each other used page has one
        self._page_by_digest: dict[bytes, int] = {}
        self._indexed: dict[int, tuple[bytes, Sequence]] = {}  # digest and first holder of each page in the index

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_pages - len(self._free)

    # ------------------------------------------------------------ for one sequence

    def allocate(self, count: int) -> list[int]:
        """Take free pages for running sequences; `count` is at most num_free."""
        first = len(self._free) - count
        pages, self._free[first:] = self._free[first:], []
        return pages

    def find(self, digest: bytes) -> int | None:
        return self._page_by_digest.get(digest)

    def share(self, sequence: Sequence, page: int) -> None:
        """Add an indexed page to the pages of a running sequence."""
        shared = self._shared.get(page)
        if shared is None:
            _, holder = self._indexed[page]
            holder.shared_pages.append(page)
            shared = self._shared[page] = _SharedPage(1, int(not holder.is_idle))
        sequence.pages.append(page)
        sequence.shared_pages.append(page)
        self.num_cached -= shared.num_running == 0
        shared.num_holders += 1
        shared.num_running += 1

    def register_full_pages(self, sequence: Sequence, first: int, end: int) -> None:
        """Add pages [first, end) of a running sequence to the index. An equal page in the index stays there."""
        indexed, page_by_digest, digests = self._indexed, self._page_by_digest, sequence.page_digests
        for number, page in enumerate(sequence.pages[first:end], first):
            if page not in indexed and (digest := digests[number]) not in page_by_digest:
                indexed[page] = digest, sequence
                page_by_digest[digest] = page

    def is_private(self, page: int) -> bool:
        """Return whether the holder can overwrite the page, which has no other holder and is not in the index."""
        return page not in self._indexed and (page not in self._shared or self._shared[page].num_holders == 1)

    def truncate(self, sequence: Sequence, num_pages: int) -> list[int]:
        """Keep the first `num_pages` pages of the sequence and release the rest; return the pages that are now free."""
        dropped = sequence.pages[num_pages:]
        if not dropped:
            return []
        shared_pages, freed = set(sequence.shared_pages).intersection(dropped), dropped
        if shared_pages:
            freed = [page for page in dropped if page not in shared_pages or self._release_shared(page, sequence)]
            sequence.shared_pages = [page for page in sequence.shared_pages if page not in shared_pages]
        if sequence.is_idle:
            self.num_cached -= len(dropped) - len(shared_pages)
        for page in self._indexed.keys() & freed:
            digest, _ = self._indexed.pop(page)
            del self._page_by_digest[digest]
        self._free += freed
        del sequence.pages[num_pages:]
        return freed

    def mark_idle(self, sequence: Sequence) -> None:
        sequence.is_idle = True
        self.num_cached += len(sequence.pages) - len(sequence.shared_pages)
        for page in sequence.shared_pages:
            shared = self._shared[page]
            shared.num_running -= 1
            self.num_cached += shared.num_running == 0

    def mark_running(self, sequence: Sequence) -> None:
        if not sequence.is_idle:
            return
        sequence.is_idle = False
        self.num_cached -= len(sequence.pages) - len(sequence.shared_pages)
        for page in sequence.shared_pages:
            shared = self._shared[page]
            self.num_cached -= shared.num_running == 0
            shared.num_running += 1

    # ------------------------------------------------------------ for all sequences

    def clear_prefix_index(self) -> None:
        """Remove all pages from the index, because older weights computed them."""
        self._page_by_digest.clear()
        self._indexed.clear()

    def _release_shared(self, page: int, sequence: Sequence) -> bool:
        """Remove one holder; return whether the page is now free."""
        shared = self._shared[page]
        shared.num_holders -= 1
        if not sequence.is_idle:
            shared.num_running -= 1
            self.num_cached += shared.num_running == 0
        if shared.num_holders > 0:
            return False
        self.num_cached -= 1
        del self._shared[page]
        return True


def compute_page_digests(token_ids: NDArray[np.int32], page_tokens: int, first: int = 0) -> dict[int, bytes]:
    """Return, for each full page from page `first` on, a hash of all tokens up to the page's end."""
    page_bytes, tokens = page_tokens * token_ids.itemsize, token_ids.tobytes()
    chained = hashlib.blake2b(tokens[: first * page_bytes], digest_size=16)
    found: dict[int, bytes] = {}
    for page, start in enumerate(range(first * page_bytes, len(tokens) - page_bytes + 1, page_bytes), first):
        chained.update(tokens[start : start + page_bytes])
        found[page] = chained.digest()
    return found

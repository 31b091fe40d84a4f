"""Allocates pages to sequences and evicts cached pages of idle sequences.

Eviction takes the pages of the least recently used idle sequence, last page first, so that a prefix remains.
"""

from __future__ import annotations

from engine.inference.kv.page_pool import PagePool, compute_page_digests
from engine.inference.sequence import PrefillChunk, Sequence


class KvCacheManager:
    def __init__(self, num_pages: int, page_tokens: int) -> None:
        self.pool = PagePool(num_pages)
        self.page_tokens = page_tokens
        self.evicted_pages = 0
        # Idle sequences with pages, by sequence_id, the least recently used first.
        self._idle: dict[int, Sequence] = {}
        self._page_digests: dict[int, list[bytes]] = {}  # of sequences in prefill, by sequence_id

    # ------------------------------------------------------------ start of a request

    def allocate(self, sequence: Sequence) -> bool:
        """Give the sequence pages for all its tokens: its own, those of an equal prefix, and free ones.

        False: it must wait, and keeps only the usable part of its own pages.
        """
        pool, size, ids = self.pool, self.page_tokens, sequence.token_ids
        self._idle.pop(sequence.sequence_id, None)
        pool.mark_running(sequence.pages)
        self._release_unusable_pages(sequence)
        page_digests = compute_page_digests(ids, size)
        found = self._find_shared_prefix(sequence, page_digests)
        for page in found:
            pool.share(page)
        missing = -(-len(ids) // size) - len(sequence.pages) - len(found)
        if pool.num_free + pool.num_cached < missing:
            pool.release(found, running=True)
            self.mark_idle(sequence)
            return False
        self._evict(missing)
        sequence.pages += found
        sequence.cached_tokens += len(found) * size
        sequence.pages += [pool.allocate() for _ in range(missing)]
        self._page_digests[sequence.sequence_id] = page_digests
        return True

    def _release_unusable_pages(self, sequence: Sequence) -> None:
        """Keep the sequence's pages up to its cached tokens, without a last partial page that is shared."""
        full, part = divmod(sequence.cached_tokens, self.page_tokens)
        if part and not self.pool.is_private(sequence.pages[full]):
            sequence.cached_tokens, part = full * self.page_tokens, 0
        usable_pages = full + bool(part)
        self.pool.release(sequence.pages[usable_pages:], running=True)
        del sequence.pages[usable_pages:]
        sequence.stale = sequence.stale and usable_pages > 0

    def _find_shared_prefix(self, sequence: Sequence, page_digests: list[bytes]) -> list[int]:
        """Pages that continue its own with the same tokens, up to its last token, which needs a pass for its logits."""
        found: list[int] = []
        if sequence.stale or sequence.cached_tokens % self.page_tokens:
            return found
        for digest in page_digests[len(sequence.pages) : (len(sequence.token_ids) - 1) // self.page_tokens]:
            page = self.pool.find(digest)
            if page is None:
                break
            found.append(page)
        return found

    def record_prefill(self, chunk: PrefillChunk) -> None:
        """This step writes these tokens to the cache; the pages that they fill may be shared."""
        sequence = chunk.sequence
        sequence.cached_tokens = chunk.end
        if not sequence.stale:
            page_digests = self._page_digests[sequence.sequence_id]
            for number in range(chunk.start // self.page_tokens, chunk.end // self.page_tokens):
                self.pool.register_full_page(sequence.pages[number], page_digests[number])

    # ------------------------------------------------------------ while it runs

    def append_page(self, sequence: Sequence) -> bool:
        """One more page. False: no page is free, and no idle sequence has one."""
        if self.pool.num_free + self.pool.num_cached < 1:
            return False
        self._evict(1)
        sequence.pages.append(self.pool.allocate())
        return True

    def mark_idle(self, sequence: Sequence) -> None:
        """The sequence has no request; its cached tokens stay until they are evicted or freed."""
        self._page_digests.pop(sequence.sequence_id, None)
        cached_pages = -(-sequence.cached_tokens // self.page_tokens)
        self.pool.release(sequence.pages[cached_pages:], running=True)
        del sequence.pages[cached_pages:]
        self.pool.mark_idle(sequence.pages)
        if sequence.pages:
            self._idle[sequence.sequence_id] = sequence

    def touch(self, sequence: Sequence) -> None:
        """Make the sequence the last to be evicted, if it is idle: it has a request."""
        if self._idle.pop(sequence.sequence_id, None) is not None:
            self._idle[sequence.sequence_id] = sequence

    # ------------------------------------------------------------ freeing pages

    def free(self, sequence: Sequence) -> list[int]:
        """Release all pages of the sequence, running or idle; returns the pages that are now free."""
        running = self._idle.pop(sequence.sequence_id, None) is None
        self._page_digests.pop(sequence.sequence_id, None)
        freed = self.pool.release(sequence.pages, running=running)
        sequence.pages, sequence.cached_tokens, sequence.stale = [], 0, False
        return freed

    def free_idle(self) -> None:
        """After new weights: free the pages of idle sequences, and share no existing page."""
        self.pool.clear_prefix_index()
        for sequence in list(self._idle.values()):
            self.free(sequence)
            sequence.computed_tokens = 0

    def _evict(self, pages: int) -> None:
        """Evict until this many pages are free."""
        while self.pool.num_free < pages:
            sequence = next(iter(self._idle.values()))
            self.evicted_pages += len(self.pool.release([sequence.pages.pop()], running=False))
            sequence.cached_tokens = min(sequence.cached_tokens, len(sequence.pages) * self.page_tokens)
            if not sequence.pages:
                del self._idle[sequence.sequence_id]
                sequence.stale = False

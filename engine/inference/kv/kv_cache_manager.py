"""Allocates pages to sequences and evicts cached pages of idle sequences.

Eviction takes the pages of the least recently used idle sequence, last page first, so that a prefix remains.
"""

from asterism.engine.inference.kv.page_pool import PagePool, compute_page_digests
from asterism.engine.inference.sequence import MissingPages, PrefillChunk, Sequence


class KvCacheManager:
    def __init__(self, num_pages: int, page_tokens: int) -> None:
        self.pool = PagePool(num_pages)
        self.page_tokens = page_tokens
        self.evicted_pages = 0
        self.evicted_caches = 0  # idle sequences that lost pages; each counts once per idle period
        self._evicting: Sequence | None = None  # the idle sequence that lost pages last
        # idle sequences with pages, by sequence_id, the least recently used first
        self._idle: dict[int, Sequence] = {}

    @property
    def num_available(self) -> int:
        """The number of pages that are free or that only idle sequences hold."""
        return self.pool.num_free + self.pool.num_cached

    # ------------------------------------------------------------ start of a request

    def allocate(self, sequence: Sequence) -> bool:
        """Give the sequence pages for all its tokens: its own pages, shared pages of an equal prefix, and free pages.

        Returns False if the sequence must wait; it keeps only the usable part of its own pages.
        """
        pool, size = self.pool, self.page_tokens
        self._pop_idle(sequence)
        pool.mark_running(sequence)
        self._release_unusable_pages(sequence)
        found = self._find_shared_prefix(sequence)
        for page in found:
            pool.share(sequence, page)
        missing = -(-len(sequence.token_ids) // size) - len(sequence.pages)
        if self.num_available < missing:
            self.mark_idle(sequence)
            return False
        self._evict(missing)
        sequence.pages += pool.allocate(missing)
        sequence.cached_tokens += len(found) * size
        return True

    def _release_unusable_pages(self, sequence: Sequence) -> None:
        """Keep the sequence's pages up to its cached tokens, without a last partial page that is shared."""
        full, part = divmod(sequence.cached_tokens, self.page_tokens)
        if part and not self.pool.is_private(sequence.pages[full]):
            sequence.cached_tokens, part = full * self.page_tokens, 0
        usable_pages = full + bool(part)
        self.pool.truncate(sequence, usable_pages)
        sequence.stale = sequence.stale and usable_pages > 0

    def _find_shared_prefix(self, sequence: Sequence) -> list[int]:
        """Return shared pages behind the sequence's own pages. The last token is left out: its logits need a pass."""
        found: list[int] = []
        first, part = divmod(sequence.cached_tokens, self.page_tokens)
        end = (len(sequence.token_ids) - 1) // self.page_tokens
        if sequence.stale or first == end:
            return found
        if first not in sequence.page_digests:
            sequence.page_digests = compute_page_digests(sequence.token_ids, self.page_tokens, first)
        for number in range(first, end) if not part else ():
            page = self.pool.find(sequence.page_digests[number])
            if page is None:
                break
            found.append(page)
        return found

    def record_prefill(self, chunk: PrefillChunk) -> None:
        """Record that this step writes these tokens to the cache; full pages can then be shared."""
        sequence = chunk.sequence
        sequence.cached_tokens = chunk.end
        if not sequence.stale:
            self.pool.register_full_pages(sequence, chunk.start // self.page_tokens, chunk.end // self.page_tokens)

    # ------------------------------------------------------------ while it runs

    def append_pages(self, missing: list[MissingPages]) -> bool:
        """Give these sequences their missing pages. Returns False, and gives none, if too few are available."""
        if not missing:
            return True
        total = sum([count for _, count in missing])
        if self.num_available < total:
            return False
        self._evict(total)
        pages, first = self.pool.allocate(total), 0
        for sequence, count in missing:
            sequence.pages += pages[first : first + count]
            first += count
        return True

    def mark_idle(self, sequence: Sequence) -> None:
        """Mark a sequence without a request. Its cached tokens stay until they are evicted or freed."""
        self.pool.truncate(sequence, -(-sequence.cached_tokens // self.page_tokens))
        self.pool.mark_idle(sequence)
        if sequence.pages:
            self._idle[sequence.sequence_id] = sequence

    def touch(self, sequence: Sequence) -> None:
        """Move an idle sequence with a new request to the end of the eviction order."""
        if self._idle.pop(sequence.sequence_id, None) is not None:
            self._idle[sequence.sequence_id] = sequence

    # ------------------------------------------------------------ freeing pages

    def free(self, sequence: Sequence) -> list[int]:
        """Release all pages of the sequence, running or idle; return the pages that are now free."""
        self._pop_idle(sequence)
        sequence.page_digests = {}
        sequence.cached_tokens, sequence.stale = 0, False
        return self.pool.truncate(sequence, 0)

    def free_idle(self) -> None:
        """After new weights, free the pages of idle sequences and stop sharing all other pages."""
        self.pool.clear_prefix_index()
        for sequence in list(self._idle.values()):
            self.free(sequence)
            sequence.computed_tokens = 0

    def _evict(self, pages: int) -> None:
        """Evict pages until this many pages are free."""
        while (short := pages - self.pool.num_free) > 0:
            sequence = next(iter(self._idle.values()))
            self.evicted_caches += sequence is not self._evicting
            self._evicting = sequence
            num_kept = max(0, len(sequence.pages) - short)  # the loop evicts more if other sequences hold these pages
            self.evicted_pages += len(self.pool.truncate(sequence, num_kept))
            sequence.cached_tokens = min(sequence.cached_tokens, len(sequence.pages) * self.page_tokens)
            if not sequence.pages:
                self._pop_idle(sequence)
                sequence.stale = False

    def _pop_idle(self, sequence: Sequence) -> None:
        if sequence is self._evicting:
            self._evicting = None
        self._idle.pop(sequence.sequence_id, None)

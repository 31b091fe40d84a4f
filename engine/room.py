"""Which sequence gets pages, and who gives them up: what is cached of parked sequences is kept until others need it.

Of parked sequences the one that was used longest ago gives up first, from its end on, so that what remains is a prefix.
"""

from __future__ import annotations

from engine.pages import PagePool, digests
from engine.sequences import Sequence, Stretch


class Room:
    """The pages of all sequences. `freed_broken` pages need clearing before anyone reads them: see `drop`."""

    def __init__(self, num_pages: int, page_tokens: int) -> None:
        self.pool = PagePool(num_pages)
        self.page_tokens = page_tokens
        self.evicted_pages = 0
        self._parked: dict[int, Sequence] = {}  # that hold pages, by sequence_id; used longest ago first
        self._digests: dict[int, list[bytes]] = {}  # of those that read their tokens

    # ------------------------------------------------------------ a request begins

    def begin(self, sequence: Sequence) -> bool:
        """Pages for all its tokens: its own, those of an equal prefix, and free ones. False: it has to wait, and holds
        no more than the part of its own that serves."""
        pool, size, ids = self.pool, self.page_tokens, sequence.token_ids
        self._parked.pop(sequence.sequence_id, None)
        pool.resume(sequence.pages)
        self._keep(sequence)
        known = digests(ids, size)
        found = self._equal_prefix(sequence, known)
        for page in found:
            pool.share(page)
        missing = -(-len(ids) // size) - len(sequence.pages) - len(found)
        if pool.free + pool.cached < missing:
            pool.release(found, running=True)
            self.park(sequence)
            return False
        self._evict(missing)
        sequence.pages += found
        sequence.cached += len(found) * size
        sequence.pages += [pool.take() for _ in range(missing)]
        self._digests[sequence.sequence_id] = known
        return True

    def _keep(self, sequence: Sequence) -> None:
        """Its own pages, as far as their tokens are still its own and may be written behind them."""
        full, part = divmod(sequence.cached, self.page_tokens)
        if part and not self.pool.is_private(sequence.pages[full]):
            sequence.cached, part = full * self.page_tokens, 0
        kept = full + bool(part)
        self.pool.release(sequence.pages[kept:], running=True)
        del sequence.pages[kept:]
        sequence.stale = sequence.stale and kept > 0

    def _equal_prefix(self, sequence: Sequence, known: list[bytes]) -> list[int]:
        """Pages that follow its own and hold the same tokens. The last token is always read: its logits are wanted."""
        found: list[int] = []
        if sequence.stale or sequence.cached % self.page_tokens:
            return found
        for digest in known[len(sequence.pages) : (len(sequence.token_ids) - 1) // self.page_tokens]:
            page = self.pool.find(digest)
            if page is None:
                break
            found.append(page)
        return found

    def read(self, stretch: Stretch) -> None:
        """These tokens are in the cache from this step on; pages that they fill may be shared."""
        sequence = stretch.sequence
        sequence.cached = stretch.end
        if not sequence.stale:
            known = self._digests[sequence.sequence_id]
            for number in range(stretch.start // self.page_tokens, stretch.end // self.page_tokens):
                self.pool.publish(sequence.pages[number], known[number])

    # ------------------------------------------------------------ it runs

    def grow(self, sequence: Sequence) -> bool:
        """One more page. False: none is free, and nobody parked has any."""
        if self.pool.free + self.pool.cached < 1:
            return False
        self._evict(1)
        sequence.pages.append(self.pool.take())
        return True

    def park(self, sequence: Sequence) -> None:
        """What it has cached stays until it is evicted or dropped."""
        self._digests.pop(sequence.sequence_id, None)
        kept = -(-sequence.cached // self.page_tokens)
        self.pool.release(sequence.pages[kept:], running=True)
        del sequence.pages[kept:]
        self.pool.park(sequence.pages)
        if sequence.pages:
            self._parked[sequence.sequence_id] = sequence

    def use(self, sequence: Sequence) -> None:
        """A parked sequence has a request: it is the last to give up its pages."""
        if self._parked.pop(sequence.sequence_id, None) is not None:
            self._parked[sequence.sequence_id] = sequence

    # ------------------------------------------------------------ pages go

    def drop(self, sequence: Sequence) -> list[int]:
        """All its pages, running or parked. Those that are free now."""
        running = self._parked.pop(sequence.sequence_id, None) is None
        self._digests.pop(sequence.sequence_id, None)
        freed = self.pool.release(sequence.pages, running=running)
        sequence.pages, sequence.cached, sequence.stale = [], 0, False
        return freed

    def forget_parked(self) -> None:
        """What is parked was computed by older weights, and nothing of now may be shared."""
        self.pool.conceal()
        for sequence in list(self._parked.values()):
            self.drop(sequence)
            sequence.computed = 0

    def _evict(self, pages: int) -> None:
        """Until so many are free."""
        while self.pool.free < pages:
            sequence = next(iter(self._parked.values()))
            self.evicted_pages += len(self.pool.release([sequence.pages.pop()], running=False))
            sequence.cached = min(sequence.cached, len(sequence.pages) * self.page_tokens)
            if not sequence.pages:
                del self._parked[sequence.sequence_id]
                sequence.stale = False

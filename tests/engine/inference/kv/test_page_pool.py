"""Tests of reference counts of the pages in the KV cache: a page counts once, even with several holders."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from asterism.engine.inference.kv.page_pool import PagePool, compute_page_digests
from asterism.engine.inference.sequence import Sequence

PAGES = 6


def test_a_full_page_is_identified_by_all_tokens_up_to_its_end() -> None:
    digests = compute_page_digests(np.arange(8, dtype=np.int32), 4)
    assert list(digests) == [0, 1]
    assert compute_page_digests(np.arange(11, dtype=np.int32), 4) == digests
    assert compute_page_digests(np.arange(11, dtype=np.int32), 4, first=1) == {1: digests[1]}
    assert compute_page_digests(np.array([9, 1, 2, 3, 4, 5, 6, 7], np.int32), 4)[1] != digests[1]
    assert compute_page_digests(np.arange(3, dtype=np.int32), 4) == {}


def start_sequence(pool: PagePool, pages: int = 1) -> Sequence:
    sequence = Sequence(0)
    sequence.pages = pool.allocate(pages)
    return sequence


def register_page(pool: PagePool, sequence: Sequence, number: int, digest: bytes) -> None:
    sequence.page_digests = {number: digest}
    pool.register_full_pages(sequence, number, number + 1)


def test_a_page_is_found_while_a_sequence_holds_it_and_only_with_the_same_weights() -> None:
    pool = PagePool(PAGES)
    first, second = start_sequence(pool), Sequence(1)
    register_page(pool, first, 0, b"a")
    page = first.pages[0]
    assert (pool.find(b"a"), pool.is_private(page)) == (page, False)
    pool.share(second, page)
    assert pool.truncate(first, 0) == []
    assert pool.find(b"a") == page
    assert pool.truncate(second, 0) == [page]
    assert pool.find(b"a") is None
    other = start_sequence(pool)
    register_page(pool, other, 0, b"b")
    pool.clear_prefix_index()
    assert (pool.find(b"b"), pool.is_private(other.pages[0])) == (None, True)


MOVES = ("start", "register", "share", "park", "resume", "truncate")


@given(st.lists(st.tuples(st.sampled_from(MOVES), st.integers(0, 99)), max_size=40))
def test_page_counts_equal_the_sum_over_holders(moves: list[tuple[str, int]]) -> None:
    pool = PagePool(PAGES)
    holders: list[Sequence] = []
    for number, (move, choice) in enumerate(moves):
        if move == "start" and pool.num_free:
            holders.append(start_sequence(pool, 1 + choice % pool.num_free))
        if move == "start" or not holders:
            continue
        sequence = holders.pop(choice % len(holders))
        match move:
            case "register" if not sequence.is_idle:
                register_page(pool, sequence, choice % len(sequence.pages), b"%d" % number)
            case "share" if findable := [page for page in sequence.pages if not pool.is_private(page)]:
                holders.append(Sequence(0))
                pool.share(holders[-1], findable[choice % len(findable)])
            case "park" if not sequence.is_idle:
                pool.mark_idle(sequence)
            case "resume":
                pool.mark_running(sequence)
            case "truncate":
                pages, kept = sequence.pages[:], choice % len(sequence.pages)
                elsewhere = {page for other in holders for page in other.pages}
                freed = pool.truncate(sequence, kept)
                assert sequence.pages == pages[:kept]
                assert freed == [page for page in pages[kept:] if page not in elsewhere]
            case _:
                pass
        if sequence.pages:
            holders.append(sequence)
        held = {page for sequence in holders for page in sequence.pages}
        assert (pool.num_used, pool.num_free) == (len(held), PAGES - len(held))
        assert pool.num_cached == len(held - {page for each in holders if not each.is_idle for page in each.pages})

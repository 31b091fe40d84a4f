"""Reference counts of the KV cache's pages: every page is counted once, however many sequences hold it."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.inference.kv.page_pool import PagePool, compute_page_digests

PAGES = 6


def test_a_full_page_is_found_by_all_tokens_up_to_its_end() -> None:
    first, second = compute_page_digests(np.arange(8, dtype=np.int32), 4)
    assert compute_page_digests(np.arange(11, dtype=np.int32), 4) == [first, second]
    assert compute_page_digests(np.array([9, 1, 2, 3, 4, 5, 6, 7], np.int32), 4)[1] != second
    assert compute_page_digests(np.arange(3, dtype=np.int32), 4) == []


def test_a_page_is_found_while_a_sequence_holds_it_and_not_after_new_weights() -> None:
    pool = PagePool(PAGES)
    page = pool.allocate()
    pool.register_full_page(page, b"a")
    assert (pool.find(b"a"), pool.is_private(page)) == (page, False)
    pool.share(page)
    assert pool.release([page], running=True) == []
    assert pool.find(b"a") == page
    assert pool.release([page], running=True) == [page]
    assert pool.find(b"a") is None
    other = pool.allocate()
    pool.register_full_page(other, b"b")
    pool.clear_prefix_index()
    assert pool.find(b"b") is None


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["take", "share", "park", "resume", "release"]), st.integers(0, 99)), max_size=40
    )
)
def test_page_counts_equal_the_sum_over_holders(moves: list[tuple[str, int]]) -> None:
    pool = PagePool(PAGES)
    holds: list[tuple[int, bool]] = []  # (page, whether its holder runs)
    for move, choice in moves:
        match move, holds:
            case "take", _ if pool.num_free:
                holds.append((pool.allocate(), True))
            case _, []:
                continue
            case "share", _:
                page, _ = holds[choice % len(holds)]
                pool.share(page)
                holds.append((page, True))
            case "take", _:
                continue
            case _, _:
                page, running = holds.pop(choice % len(holds))
                if move == "release":
                    freed = pool.release([page], running=running)
                    assert freed == ([] if any(held == page for held, _ in holds) else [page])
                else:
                    if (move == "park") == running:
                        (pool.mark_idle if running else pool.mark_running)([page])
                        running = not running
                    holds.append((page, running))
        held = {page for page, _ in holds}
        assert (pool.num_used, pool.num_free) == (len(held), PAGES - len(held))
        assert pool.num_cached == len(held - {page for page, running in holds if running})

"""What is known of a server's prefix cache, and on which rank a sequence's prefix lies."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.sglang import placement, prefixes
from engine.sglang.placement import SLACK, Ranks
from engine.sglang.prefixes import Prefixes


def ids(*tokens: int) -> NDArray[np.int32]:
    return np.array(tokens, np.int32)


def test_a_sequence_that_goes_on_had_its_prefix_and_another_text_did_not():
    known = Prefixes()
    known.keep(1, ids(4, 5, 6))
    known.keep(2, ids(4, 5))
    assert known.tokens == 5
    prefix = known.recall(1, ids(4, 5, 6, 7))
    assert prefix is not None
    assert (prefix.tokens, prefix.wanted, known.tokens) == (3, True, 2)
    assert known.recall(2, ids(4, 6, 7)) is None
    assert known.recall(3, ids(4, 5)) is None


def test_a_shorter_text_than_was_computed_counts_as_new():
    known = Prefixes()
    known.keep(1, ids(4, 5, 6))
    assert known.recall(1, ids(4, 5)) is None


def test_what_is_forgotten_is_still_known_and_no_longer_wanted():
    known = Prefixes()
    known.keep(1, ids(4, 5))
    known.forget(1)
    known.forget(2)
    prefix = known.recall(1, ids(4, 5, 6))
    assert prefix is not None
    assert not prefix.wanted


def test_under_new_weights_nothing_was_there_before():
    known = Prefixes()
    known.keep(1, ids(4, 5))
    known.clear()
    assert (known.tokens, known.recall(1, ids(4, 5))) == (0, None)


def test_the_oldest_is_dropped_first(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prefixes, "REMEMBERED", 2)
    known = Prefixes()
    for sequence_id in (1, 2, 3):
        known.keep(sequence_id, ids(4, 5))
    assert known.tokens == 4
    assert known.recall(1, ids(4, 5)) is None
    assert known.recall(2, ids(4, 5)) is not None


def test_one_rank_needs_no_choice():
    assert Ranks(1).begin(1, ids(4)) is None


def test_a_sequence_stays_and_its_siblings_join_it_while_others_go_where_least_is_done():
    ranks = Ranks(2)
    assert [ranks.begin(sequence_id, ids(4, 5)) for sequence_id in (1, 2)] == [0, 0]
    assert ranks.begin(3, ids(8)) == 1
    ranks.end(0)
    ranks.end(0)
    assert ranks.begin(4, ids(9)) == 0  # nothing runs there now
    assert ranks.begin(1, ids(4, 5, 6)) == 0
    assert ranks.begin(3, ids(8, 9, 9)) == 1


def test_a_rank_that_is_much_busier_takes_no_more_siblings():
    ranks = Ranks(2)
    chosen = [ranks.begin(sequence_id, ids(4, 5)) for sequence_id in range(SLACK + 3)]
    assert chosen == [0] * (SLACK + 1) + [1, 1]


def test_ranks_forget_the_oldest_sequence(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(placement, "REMEMBERED", 1)
    ranks = Ranks(2)
    assert [ranks.begin(1, ids(4)), ranks.begin(2, ids(5))] == [0, 1]
    ranks.end(1)
    assert ranks.begin(1, ids(4, 6)) == 1  # rank 0 is busy

import numpy as np
import pytest
from numpy.typing import NDArray

from asterism.engine import prefix_tracker
from asterism.engine.prefix_tracker import PrefixTracker


def make_ids(*tokens: int) -> NDArray[np.int32]:
    return np.array(tokens, np.int32)


def test_a_continued_sequence_matches_its_prefix_and_another_text_does_not():
    tracker = PrefixTracker()
    tracker.record(1, make_ids(4, 5, 6))
    tracker.record(2, make_ids(4, 5))
    assert tracker.num_tokens == 5
    prefix = tracker.pop_matching(1, make_ids(4, 5, 6, 7))
    assert prefix is not None
    assert (prefix.num_tokens, prefix.is_active, tracker.num_tokens) == (3, True, 2)
    assert tracker.pop_matching(2, make_ids(4, 6, 7)) is None
    assert tracker.pop_matching(3, make_ids(4, 5)) is None
    tracker.record(4, make_ids(4, 5, 6))
    assert tracker.pop_matching(4, make_ids(4, 5)) is None  # it is shorter


def test_an_inactive_prefix_still_matches():
    tracker = PrefixTracker()
    tracker.record(1, make_ids(4, 5))
    tracker.mark_inactive(1)
    tracker.mark_inactive(2)
    prefix = tracker.pop_matching(1, make_ids(4, 5, 6))
    assert prefix is not None
    assert not prefix.is_active


def test_clearing_drops_every_prefix():
    tracker = PrefixTracker()
    tracker.record(1, make_ids(4, 5))
    tracker.clear()
    assert (tracker.num_tokens, tracker.pop_matching(1, make_ids(4, 5))) == (0, None)


def test_the_oldest_prefix_is_dropped_first(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prefix_tracker, "MAX_TRACKED", 2)
    tracker = PrefixTracker()
    for sequence_id in (1, 2, 3):
        tracker.record(sequence_id, make_ids(4, 5))
    assert tracker.num_tokens == 4
    assert tracker.pop_matching(1, make_ids(4, 5)) is None
    assert tracker.pop_matching(2, make_ids(4, 5)) is not None

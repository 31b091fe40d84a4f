import numpy as np
import pytest
from numpy.typing import NDArray

from asterism.engine import prefix_tracker
from asterism.engine.sglang.dp_routing import MAX_IMBALANCE, DataParallelRouter


def make_ids(*tokens: int) -> NDArray[np.int32]:
    return np.array(tokens, np.int32)


def test_a_single_rank_needs_no_assignment():
    assert DataParallelRouter(1).assign(1, make_ids(4)) is None


def test_sequences_of_one_prompt_share_a_rank_and_others_use_the_least_busy_rank():
    router = DataParallelRouter(2)
    assert [router.assign(sequence_id, make_ids(4, 5)) for sequence_id in (1, 2)] == [0, 0]
    assert router.assign(3, make_ids(8)) == 1
    router.release(0)
    router.release(0)
    assert router.assign(4, make_ids(9)) == 0  # rank 0 is idle
    assert router.assign(1, make_ids(4, 5, 6)) == 0
    assert router.assign(3, make_ids(8, 9, 9)) == 1


def test_a_much_busier_rank_gets_no_more_siblings():
    router = DataParallelRouter(2)
    chosen = [router.assign(sequence_id, make_ids(4, 5)) for sequence_id in range(MAX_IMBALANCE + 3)]
    assert chosen == [0] * (MAX_IMBALANCE + 1) + [1, 1]


def test_the_router_drops_the_oldest_sequence(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prefix_tracker, "MAX_TRACKED", 1)
    router = DataParallelRouter(2)
    assert [router.assign(1, make_ids(4)), router.assign(2, make_ids(5))] == [0, 1]
    router.release(1)
    assert router.assign(1, make_ids(4, 6)) == 1  # rank 0 is still busy

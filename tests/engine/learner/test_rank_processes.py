"""Test: an error on a rank fails the test that started the ranks."""

import pytest

from asterism.engine.learner.distributed import RankGroup
from tests.engine.learner.rank_processes import run_ranks


def fail(_ranks: RankGroup) -> None:
    int("no number")


@pytest.mark.slow
def test_the_first_error_of_a_rank_is_reported_and_ends_the_other_ranks() -> None:
    with pytest.raises(AssertionError, match=r"(?s)^rank [01], 1: Process [01]:\nTraceback .*invalid literal for int"):
        run_ranks(2, fail)

"""The order in which new trajectories with given lengths start."""

import pytest

from asterism.policies.arbiter.kv_ledger import KvAccount, Ledger
from asterism.policies.arbiter.start_queue import StartQueue
from tests.policies.arbiter.leases import request


class Waiting:
    """A start queue with trajectories that request, start and end; `final` contains the final length of each group."""

    def __init__(self, *, overtaken: int = 1000, completes: bool = False) -> None:
        self.ledger = Ledger()
        self.final: dict[int, float] = {}
        self.new = StartQueue(
            self.ledger.groups,
            lambda holding: self.final.get(holding.group_id, 100.0),
            max_overtakes=overtaken,
            ends_at_first_groups=completes,
        )

    def add(self, group: int, *trajectories: int) -> None:
        for tid in trajectories:
            self.new.add(self.ledger.enqueue_request(request(tid, group), "rollout-0", 0.0))

    def add_groups(self, size: int, *groups: int) -> None:
        for group in groups:
            self.add(group, *range(10 * group, 10 * group + size))

    def start_next(self) -> KvAccount:
        holding, _ = self.new.peek()
        assert holding is not None
        assert holding.trajectory_id in self.new
        self.new.mark_started(holding)
        assert holding.trajectory_id not in self.new
        return holding

    def start_groups(self, number: int) -> list[int]:
        return [self.start_next().group_id for _ in range(number)]

    def end(self, tid: int) -> None:
        holding = self.ledger.close_account(tid, 8)
        self.new.discard(tid)
        if holding.group_id in self.ledger.groups:
            self.new.update_rank(holding.group_id)
        else:
            self.new.remove_group(holding.group_id)


def test_a_few_trajectories_of_each_group_start_before_the_longest_expected_trajectories() -> None:
    waiting = Waiting()
    waiting.final = {1: 100.0, 2: 900.0, 3: 500.0}
    waiting.add_groups(6, 1, 2, 3)
    probes = waiting.start_groups(12)
    assert [probes.count(group) for group in (1, 2, 3)] == [4, 4, 4]
    assert waiting.start_groups(6) == [2, 2, 3, 3, 1, 1]
    assert waiting.new.peek() == (None, False)
    assert len(waiting.new) == 0


def test_within_a_group_the_first_request_starts_first() -> None:
    waiting = Waiting()
    waiting.add(1, 15, 11, 13)
    assert [waiting.start_next().trajectory_id for _ in range(3)] == [15, 11, 13]


@pytest.mark.parametrize(("before", "after", "order"), [(100.0, 900.0, [2, 2, 1, 1]), (900.0, 50.0, [1, 1, 2, 2])])
def test_a_group_is_ranked_again_when_its_expected_length_changes(
    before: float, after: float, order: list[int]
) -> None:
    """The expected final length of group 2 changes; it is 100 for group 1."""
    waiting = Waiting()
    waiting.final = {2: before}
    waiting.add_groups(6, 1, 2)
    waiting.start_groups(8)
    waiting.final = {2: after}
    waiting.new.update_rank(2)
    assert waiting.start_groups(4) == order


def test_a_trajectory_is_overdue_after_the_maximum_number_of_overtakes() -> None:
    waiting = Waiting(overtaken=5)
    waiting.final = {1: 100.0, 2: 900.0}
    waiting.add(1, *range(10, 14))
    waiting.start_groups(4)
    waiting.add(1, 14)
    waiting.add(2, *range(20, 40))
    for _ in range(5):
        assert waiting.new.peek()[1] is False
        assert waiting.start_next().group_id == 2
    oldest, overdue = waiting.new.peek()
    assert (oldest is not None and oldest.trajectory_id, overdue) == (14, True)
    assert waiting.start_next().trajectory_id == 14
    assert waiting.new.peek()[0] is waiting.ledger.accounts[25]
    assert waiting.new.peek()[1] is True  # trajectory 25 is the first of the later arrivals


def test_in_an_oversampled_step_the_group_that_is_closest_to_its_end_is_first() -> None:
    waiting = Waiting(completes=True)
    waiting.final = {1: 900.0}
    waiting.add(1, *range(10, 16))
    waiting.add(2, *range(20, 24))
    waiting.add(3, *range(30, 34))
    assert waiting.start_groups(8) == [2, 2, 2, 2, 3, 3, 3, 3]
    waiting.add(4, *range(40, 44))
    assert waiting.start_groups(1) == [4]
    for tid in (10, 11, 12):
        waiting.end(tid)
    assert waiting.start_groups(1) == [1]  # three members of group 1 have not ended


def test_a_fully_started_group_is_ranked_again_when_members_are_added() -> None:
    waiting = Waiting()
    waiting.add(1, 10)
    waiting.start_next()
    assert waiting.new.peek() == (None, False)
    waiting.add(1, 11)
    assert waiting.start_next().trajectory_id == 11


@pytest.mark.parametrize("groups", [1, 5])
def test_repeated_ranking_takes_bounded_memory(groups: int) -> None:
    waiting = Waiting()
    waiting.add_groups(5, *range(groups))
    for number in range(1000):
        waiting.final[number % groups] = float(number)
        waiting.new.update_rank(number % groups)
        assert len(waiting.new._group_heap) <= 16 * groups + 1  # pyright: ignore[reportPrivateUsage]
    waiting.start_groups(4 * groups)
    assert waiting.start_groups(groups) == sorted(range(groups), reverse=True)
    for group in range(groups):
        for tid in range(10 * group, 10 * group + 5):
            waiting.end(tid)
    new = waiting.new
    assert not (new._members or new._stamps or new._num_started_by_group)  # pyright: ignore[reportPrivateUsage]

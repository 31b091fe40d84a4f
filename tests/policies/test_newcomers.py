"""Who is begun next among those that wait, with lengths that are told."""

from __future__ import annotations

import pytest

from policies.ledger import Holding, Ledger
from policies.newcomers import Newcomers
from tests.policies.leases import request


class Waiting:
    """Trajectories that ask, are begun, and end; each group is as long as `final` says."""

    def __init__(self, *, overtaken: int = 1000, completes: bool = False) -> None:
        self.ledger = Ledger()
        self.final: dict[int, float] = {}
        self.new = Newcomers(
            self.ledger.groups,
            lambda holding: self.final.get(holding.group_id, 100.0),
            overtaken=overtaken,
            completes=completes,
        )

    def ask(self, group: int, *trajectories: int) -> None:
        for tid in trajectories:
            self.new.add(self.ledger.request(request(tid, group), "rollout-0", 0.0))

    def begin(self) -> Holding:
        holding, _ = self.new.first()
        assert holding is not None
        assert holding.trajectory_id in self.new
        self.new.begin(holding)
        assert holding.trajectory_id not in self.new
        return holding

    def groups_of(self, number: int) -> list[int]:
        return [self.begin().group_id for _ in range(number)]

    def end(self, tid: int) -> None:
        holding = self.ledger.release(tid, 8)
        self.new.discard(tid)
        if holding.group_id in self.ledger.groups:
            self.new.rank(holding.group_id)
        else:
            self.new.forget(holding.group_id)


def test_of_each_group_a_few_are_begun_and_then_the_expected_longest() -> None:
    waiting = Waiting()
    waiting.final = {1: 100.0, 2: 900.0, 3: 500.0}
    for group in (1, 2, 3):
        waiting.ask(group, *range(10 * group, 10 * group + 6))
    probes = waiting.groups_of(12)
    assert [probes.count(group) for group in (1, 2, 3)] == [4, 4, 4]
    assert waiting.groups_of(6) == [2, 2, 3, 3, 1, 1]
    assert waiting.new.first() == (None, False)
    assert len(waiting.new) == 0


def test_of_one_group_the_first_that_asked_is_begun_first() -> None:
    waiting = Waiting()
    waiting.ask(1, 15, 11, 13)
    assert [waiting.begin().trajectory_id for _ in range(3)] == [15, 11, 13]


def test_a_group_gets_its_new_place_when_its_length_becomes_known_while_nobody_has_ended() -> None:
    waiting = Waiting()
    for group in (1, 2):
        waiting.ask(group, *range(10 * group, 10 * group + 7))
    waiting.groups_of(8)
    waiting.final = {1: 100.0, 2: 900.0}  # its first have come so far by now
    waiting.new.rank(2)
    assert waiting.groups_of(3) == [2, 2, 2]
    assert waiting.groups_of(3) == [1, 1, 1]


def test_a_group_that_turns_out_short_gives_its_place_away() -> None:
    waiting = Waiting()
    waiting.final = {1: 100.0, 2: 900.0}
    for group in (1, 2):
        waiting.ask(group, *range(10 * group, 10 * group + 6))
    waiting.groups_of(8)
    waiting.final[2] = 50.0
    waiting.new.rank(2)
    assert waiting.groups_of(4) == [1, 1, 2, 2]


def test_one_that_was_overtaken_by_as_many_as_may_is_overdue() -> None:
    waiting = Waiting(overtaken=5)
    waiting.final = {1: 100.0, 2: 900.0}
    waiting.ask(1, *range(10, 14))
    waiting.groups_of(4)
    waiting.ask(1, 14)
    waiting.ask(2, *range(20, 40))
    for _ in range(5):
        assert waiting.new.first()[1] is False
        assert waiting.begin().group_id == 2
    oldest, overdue = waiting.new.first()
    assert (oldest is not None and oldest.trajectory_id, overdue) == (14, True)
    assert waiting.begin().trajectory_id == 14
    assert waiting.new.first()[0] is waiting.ledger.holdings[25]
    assert waiting.new.first()[1] is True  # of those that came then it is the first


def test_where_complete_groups_are_taken_the_one_with_the_fewest_left_is_first_and_then_the_one_that_was_begun() -> (
    None
):
    waiting = Waiting(completes=True)
    waiting.final = {1: 900.0}
    waiting.ask(1, *range(10, 16))
    waiting.ask(2, *range(20, 24))
    waiting.ask(3, *range(30, 34))
    assert waiting.groups_of(8) == [2, 2, 2, 2, 3, 3, 3, 3]
    waiting.ask(4, *range(40, 44))
    assert waiting.groups_of(1) == [4]
    for tid in (10, 11, 12):
        waiting.end(tid)
    assert waiting.groups_of(1) == [1]  # three of it are left


def test_who_is_withdrawn_is_not_begun() -> None:
    waiting = Waiting()
    waiting.ask(1, 10, 11, 12)
    waiting.ask(2, 20)
    for tid in (10, 11, 20):
        waiting.end(tid)
    assert len(waiting.new) == 1
    assert waiting.begin().trajectory_id == 12
    assert waiting.new.first() == (None, False)


def test_a_group_that_was_begun_wholly_is_ranked_again_when_more_of_it_come() -> None:
    waiting = Waiting()
    waiting.ask(1, 10)
    waiting.begin()
    assert waiting.new.first() == (None, False)
    waiting.ask(1, 11)
    assert waiting.begin().trajectory_id == 11


@pytest.mark.parametrize("groups", [1, 5])
def test_however_often_groups_are_ranked_their_places_take_bounded_memory(groups: int) -> None:
    waiting = Waiting()
    for group in range(groups):
        waiting.ask(group, *range(10 * group, 10 * group + 5))
    for number in range(1000):
        waiting.final[number % groups] = float(number)
        waiting.new.rank(number % groups)
        assert len(waiting.new._groups) <= 16 * groups + 1  # pyright: ignore[reportPrivateUsage]
    waiting.groups_of(4 * groups)
    assert waiting.groups_of(groups) == sorted(range(groups), reverse=True)
    for group in range(groups):
        for tid in range(10 * group, 10 * group + 5):
            waiting.end(tid)
    new = waiting.new
    assert not (new._members or new._stamps or new._begun)  # pyright: ignore[reportPrivateUsage]

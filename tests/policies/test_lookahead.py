"""kv_lookahead's stated order, with lengths that are known: who is served first, who gives way, and where."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from bus.messages import AnyMessage, CacheReleased, LeaseDeferred, LeaseGranted, LeaseParked, LeaseReleased
from policies.arbiter import Arbiter
from policies.decider import Send
from policies.forecast import begins
from policies.ledger import Holding
from policies.lookahead import Lookahead
from tests.policies.leases import granted, joined, load, request, served, settled

PROMPT = 10
RESPONSE = 990


class Known:
    """Implements policies.lookahead.Expected: every turn is `turn` tokens long, a trajectory as its group is."""

    def __init__(self, turn: int = 100) -> None:
        self.limit = RESPONSE
        self.turn = turn
        self.final: dict[int, float] = {}

    def turn_tokens(self, holding: Holding, share: float) -> int:
        return self.turn

    def final_tokens(self, holding: Holding) -> float:
        return max(holding.tokens + 1.0, self.final.get(holding.group_id, 0.0))

    def alive(self, holding: Holding) -> NDArray[np.float64]:
        return (begins(self.limit) < self.final_tokens(holding) - holding.tokens).astype(np.float64)


class Scene:
    """An arbiter, and trajectories that ask, park and end by name."""

    def __init__(self, *capacities: int, turn: int = 100, overtaken: int = 1000, completes: bool = False) -> None:
        self.arbiter = Arbiter("kv_lookahead", RESPONSE)
        self.expected = Known(turn)
        self.policy = Lookahead(self.arbiter.ledger, self.expected, overtaken=overtaken, completes=completes)
        self.arbiter.policy = self.policy
        self.now = 0.0
        for number, tokens in enumerate(capacities):
            self.arbiter.decide(0.0, joined(number, tokens))

    def ask(self, tid: int, group: int | None = None, *, tokens: int = PROMPT, turn: int = 0) -> Sequence[Send]:
        holding = self.arbiter.ledger.holdings.get(tid)
        lease = 1 if holding is None else holding.leases + 1
        group = holding.group_id if holding is not None else group
        event = request(tid, group, tokens=tokens, turn=turn, lease=lease, prompt=PROMPT, response=RESPONSE)
        return self.tell(event)

    def tell(self, event: AnyMessage) -> Sequence[Send]:
        return settled(self.arbiter, self.now, event)

    def park(self, tid: int, tokens: int) -> Sequence[Send]:
        return self.tell(LeaseParked(tid, tokens))

    def end(self, tid: int, tokens: int) -> Sequence[Send]:
        return self.tell(LeaseReleased(tid, tokens))


def released(effects: Sequence[Send]) -> list[int]:
    return [effect.message.trajectory_id for effect in effects if isinstance(effect.message, CacheReleased)]


def test_a_lease_covers_what_the_turn_is_expected_to_need() -> None:
    (grant,) = granted(Scene(1000).ask(1))
    assert grant.tokens == PROMPT + 100


def test_a_turn_that_its_lease_has_ended_goes_ahead_of_one_that_a_tool_has_answered() -> None:
    scene = Scene(330)
    for tid in (1, 2, 3):
        scene.ask(tid)  # 110 each: all is leased
    scene.expected.turn = 200
    assert served(scene.ask(1, tokens=110, turn=1)) == []
    assert served(scene.ask(3, tokens=110)) == []
    assert served(scene.end(2, 20)) == [3]


def test_of_two_that_wait_with_a_cache_the_older_trajectory_is_first() -> None:
    scene = Scene(220)
    scene.ask(1)
    scene.ask(2)
    scene.park(2, 110)
    scene.park(1, 110)
    scene.expected.turn = 110
    scene.now = 0.1
    first = scene.ask(2, tokens=111, turn=1)
    assert (served(first), released(first)) == ([2], [1])  # nobody else was there to ask
    scene.now = 0.2
    assert served(scene.ask(1, tokens=111, turn=1)) == []


def test_parked_caches_go_first_and_the_one_that_was_parked_longest_before_the_others() -> None:
    scene = Scene(330)
    for tid in (1, 2, 3):
        scene.ask(tid)
    scene.park(2, 110)
    scene.park(1, 110)
    effects = scene.ask(3, tokens=110)  # its turn goes on
    assert (released(effects), served(effects)) == ([2], [3])
    grant = next(iter(granted(effects)))
    assert grant.reason == "goes on with its turn"


def test_a_shorter_lease_is_given_where_the_whole_does_not_fit_and_is_worth_its_messages() -> None:
    scene = Scene(300)
    scene.ask(1)
    scene.ask(2)  # 220 are leased
    scene.expected.turn = 300
    (grant,) = granted(scene.ask(1, tokens=110))
    assert grant.tokens == 110 + 80
    assert "as far as there is room" in grant.reason


def test_the_youngest_that_waits_loses_its_cache_once_patience_has_ended_and_the_oldest_never_does() -> None:
    scene = Scene(220)
    scene.ask(1)
    scene.ask(2)
    assert served(scene.ask(1, tokens=110)) == []  # 2 runs: it may make room
    scene.now = 0.5
    assert released(scene.ask(2, tokens=110)) == [2]  # nobody runs: there is nothing to wait for


def test_who_waits_beside_a_trajectory_that_runs_is_patient() -> None:
    scene = Scene(330)
    for tid in (1, 2, 3):
        scene.ask(tid)
    assert not released([*scene.ask(1, tokens=110), *scene.ask(2, tokens=110)])
    scene.now = 0.9
    assert not released(scene.tell(load(steps=1)))
    scene.now = 1.1
    effects = scene.tell(load(steps=2))
    assert (released(effects), served(effects)) == ([2], [1])
    told = [effect.message for effect in effects if isinstance(effect.message, LeaseDeferred)]
    assert told == [LeaseDeferred(2, "an older one needs its room")]


def test_the_one_that_has_lost_its_cache_goes_wherever_there_is_room_ahead_of_new_ones() -> None:
    scene = Scene(220)
    scene.ask(1)
    scene.ask(2)
    scene.ask(3)
    scene.ask(1, tokens=110)
    scene.ask(2, tokens=110)  # loses its cache to 1
    effects = scene.tell(joined(1, 220))
    assert [(grant.trajectory_id, grant.engine) for grant in granted(effects)] == [(2, "generator-1")]
    assert granted(effects)[0].reason == "there is room to compute its cache anew"


def test_a_trajectory_that_asks_after_its_cache_was_given_up_is_placed_at_once_where_there_is_room() -> None:
    scene = Scene(220, 1000)
    scene.expected.final = {50: 990.0}
    scene.ask(9, group=50)  # the larger engine is taken
    scene.ask(1)
    scene.ask(2)
    scene.park(1, 110)
    assert released(scene.ask(2, tokens=110)) == [1]
    scene.end(9, PROMPT)
    (grant,) = granted(scene.ask(1, tokens=120, turn=1))
    assert grant.engine == "generator-1"


def test_of_each_group_the_first_few_are_begun_before_the_expected_longest() -> None:
    scene = Scene()
    scene.expected.final = {0: 150.0, 1: 300.0}
    for tid in range(16):
        scene.ask(tid, tid % 2)
    effects = scene.tell(joined(0, 100_000))
    order = [tid % 2 for tid in served(effects)]
    assert order[:8].count(0) == order[:8].count(1) == 4  # the probes of both
    assert order[8:] == [1] * 4 + [0] * 4
    assert [tid for tid in served(effects) if tid % 2] == sorted(tid for tid in range(16) if tid % 2)


def test_where_the_first_complete_groups_are_taken_the_one_with_the_fewest_left_is_preferred() -> None:
    scene = Scene(330, completes=True)  # three at a time
    scene.expected.final = {0: 100.0, 1: 110.0}
    for tid in range(8):
        scene.ask(tid, tid // 4)
    assert [tid for tid, holding in scene.arbiter.ledger.holdings.items() if holding.state == "running"] == [0, 1, 2]
    assert served(scene.end(0, 20)) == [3]  # the last of its group, though the other's are longer
    assert served(scene.end(1, 20)) == [4]
    assert served(scene.end(2, 20)) == [5]


def test_none_is_begun_that_would_not_fit_at_the_worst_moment_to_come() -> None:
    scene = Scene(1000, turn=50)
    scene.expected.final = {0: 450.0}
    assert served(scene.ask(1, 0)) == [1]
    assert served(scene.ask(2, 0)) == [2]
    assert served(scene.ask(3, 0)) == []  # 60 tokens would do now; 3 * 450 are to come
    assert served(scene.end(1, 60)) == [3]


def test_none_is_begun_on_an_engine_where_somebody_waits_with_a_cache() -> None:
    scene = Scene(230)
    scene.ask(1)
    scene.ask(2)
    scene.expected.turn = 400
    assert served(scene.ask(1, tokens=110)) == []
    scene.expected.turn = 5
    (deferred,) = scene.ask(3, tokens=PROMPT)
    assert isinstance(deferred.message, LeaseDeferred)


def test_a_new_one_is_overtaken_by_no_more_than_the_bound() -> None:
    scene = Scene(140, overtaken=5)  # room for one at a time
    scene.expected.final = {0: 100.0} | {group: 100.0 + group for group in range(1, 50)}
    running = 100
    scene.policy._new._begun.update(dict.fromkeys(range(50), 99))  # pyright: ignore[reportPrivateUsage] - no probes
    scene.ask(running, 49)
    scene.ask(0, 0)
    overtook: list[int] = []
    for group in range(1, 40):
        scene.ask(group, group)
        (running,) = served(scene.end(running, PROMPT))
        if running == 0:
            break
        overtook.append(running)
    assert len(overtook) == 5
    grant = scene.arbiter.ledger.holdings[0]
    assert grant.state == "running"


def test_an_idle_engine_takes_a_new_one_though_another_has_more_room_on_paper() -> None:
    scene = Scene(120, 1200, turn=50)
    scene.expected.final = {0: 990.0, 1: 700.0}
    assert granted(scene.ask(1, 0))[0].engine == "generator-1"
    assert granted(scene.ask(2, 0))[0].engine == "generator-0"  # alone there, whatever is expected of it


def test_alone_on_its_engine_a_trajectory_gets_whatever_is_left() -> None:
    scene = Scene(1000, turn=985)
    scene.ask(1)
    scene.tell(load())
    for number in range(1, 5):
        scene.tell(load(evicted=number))  # it is trusted with less
    (grant,) = granted(scene.ask(1, tokens=995))
    assert isinstance(grant, LeaseGranted)
    assert grant.tokens == 1000


@pytest.mark.parametrize("ending", ["end", "ask"])
def test_entries_of_the_past_give_nobody_a_place(ending: str) -> None:
    scene = Scene(220)
    scene.ask(1)
    scene.ask(2)
    scene.ask(1, tokens=110)  # waits with a cache
    effects = scene.end(1, 110) if ending == "end" else scene.ask(2, tokens=110)
    assert served(effects) == ([] if ending == "end" else [1])
    assert scene.arbiter.policy.next(scene.now) is None


def test_members_of_a_group_go_where_their_prompt_lies_while_there_is_room_for_a_few_more() -> None:
    scene = Scene(6000, 6100, 5000)
    scene.expected.final = {0: 500.0}
    where = [granted(scene.ask(tid, 0))[0].engine for tid in range(6)]
    assert where == ["generator-1"] * 4 + ["generator-0"] * 2


def test_when_nobody_is_left_to_begin_one_of_the_engine_that_ends_last_moves_to_the_one_that_ends_first() -> None:
    scene = Scene(4000, 4000)
    scene.expected.final = dict.fromkeys(range(4), 1000.0)
    for number in range(10):
        both_report(scene, number)
    for tid in range(4):
        scene.ask(tid, tid)
    where = {tid: scene.arbiter.ledger.holdings[tid].engine for tid in range(4)}
    first, second = (tid for tid, engine in where.items() if engine is scene.arbiter.ledger.engines["generator-0"])
    for tid in {*where} - {first, second}:
        scene.end(tid, 20)
    both_report(scene, 10)
    scene.park(first, 110)
    moves = scene.ask(first, tokens=111, turn=1)
    assert (released(moves), granted(moves)[0].engine) == ([first], "generator-1")
    assert granted(moves)[0].reason == "generator-0 would end last, and generator-1 first"
    assert granted(scene.ask(second, tokens=110))[0].engine == "generator-0"  # they end together now


def test_nobody_moves_while_others_wait_to_be_begun() -> None:
    scene = Scene(4000, 1100)
    scene.expected.final = dict.fromkeys(range(6), 1000.0)
    for number in range(10):
        both_report(scene, number)
    for tid in range(6):
        scene.ask(tid, tid)
    holdings = scene.arbiter.ledger.holdings
    assert holdings[5].state == "waiting"
    both_report(scene, 10)
    assert granted(scene.ask(0, tokens=110))[0].engine == "generator-0"
    scene.end(5, PROMPT)
    assert granted(scene.ask(1, tokens=110))[0].engine == "generator-1"


def both_report(scene: Scene, number: int) -> None:
    """Ten steps since the last time, each of which takes a microsecond for a cached token, and nothing else does."""
    for engine in ("generator-0", "generator-1"):
        scene.tell(load(engine, steps=10 * number, busy_s=0.1 * number**2, used=20_000 * number))


def test_an_engine_that_is_trusted_with_less_than_it_has_leased_gives_up_that_much_more() -> None:
    scene = Scene(1000, turn=240)
    for tid in (1, 2, 3, 4):
        scene.ask(tid)  # 250 each: all is leased
    for tid in (2, 3, 4):
        scene.park(tid, 250)
    scene.arbiter.decide(0.0, load())
    for number in range(1, 7):
        scene.arbiter.decide(0.0, load(evicted=number))  # it is trusted with 732
    effects = scene.ask(1, tokens=250)
    assert released(effects) == [2, 3]  # one alone would leave less room than it is asked for
    assert served(effects) == [1]

"""The policy kv_lookahead: its order of grants, evictions and chosen engines, with known lengths."""

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from asterism.bus.messages import AnyMessage, CacheReleased, LeaseDeferred, LeaseGranted, LeasePaused, LeaseReleased
from asterism.policies.arbiter.arbiter import Arbiter
from asterism.policies.arbiter.kv_demand import compute_interval_starts
from asterism.policies.arbiter.kv_ledger import KvAccount
from asterism.policies.arbiter.kv_lookahead import LookaheadPolicy
from asterism.policies.decider import Send
from tests.policies.arbiter.leases import granted, joined, load, request, served, settled

PROMPT = 10
RESPONSE = 990


class Known:
    """A length forecast with known lengths: `turn` tokens for every turn, and one final length for each group."""

    def __init__(self, turn: int = 100) -> None:
        self.limit = RESPONSE
        self.turn = turn
        self.final: dict[int, float] = {}

    def estimate_turn_tokens(self, account: KvAccount, quantile: float) -> int:
        return self.turn

    def estimate_final_tokens(self, account: KvAccount) -> float:
        return max(account.tokens + 1.0, self.final.get(account.group_id, 0.0))

    def survival_curve(self, account: KvAccount) -> NDArray[np.float64]:
        return (compute_interval_starts(self.limit) < self.estimate_final_tokens(account) - account.tokens).astype(
            np.float64
        )


class Scene:
    """An arbiter whose trajectories request leases, pause and end; the methods take their ids."""

    def __init__(self, *capacities: int, turn: int = 100, overtaken: int = 1000, completes: bool = False) -> None:
        self.arbiter = Arbiter("kv_lookahead", RESPONSE)
        self.expected = Known(turn)
        self.policy = LookaheadPolicy(
            self.arbiter.ledger, self.expected, max_overtakes=overtaken, ends_at_first_groups=completes
        )
        self.arbiter.policy = self.policy
        self.now = 0.0
        for number, tokens in enumerate(capacities):
            self.arbiter.decide(0.0, joined(number, tokens))

    def request_lease(
        self, tid: int, group: int | None = None, *, tokens: int = PROMPT, turn: int = 0
    ) -> Sequence[Send]:
        holding = self.arbiter.ledger.accounts.get(tid)
        lease = 1 if holding is None else holding.num_leases + 1
        group = holding.group_id if holding is not None else group
        event = request(tid, group, tokens=tokens, turn=turn, lease=lease, prompt=PROMPT, response=RESPONSE)
        return self.decide(event)

    def request_leases(self, *tids: int) -> None:
        for tid in tids:
            self.request_lease(tid)

    def decide(self, event: AnyMessage) -> Sequence[Send]:
        return settled(self.arbiter, self.now, event)

    def pause(self, tid: int, tokens: int) -> Sequence[Send]:
        return self.decide(LeasePaused(tid, tokens))

    def end(self, tid: int, tokens: int) -> Sequence[Send]:
        return self.decide(LeaseReleased(tid, tokens))


def released(effects: Sequence[Send]) -> list[int]:
    return [effect.message.trajectory_id for effect in effects if isinstance(effect.message, CacheReleased)]


def test_a_lease_covers_the_expected_tokens_of_the_turn() -> None:
    (grant,) = granted(Scene(1000).request_lease(1))
    assert grant.tokens == PROMPT + 100


def test_extensions_within_a_turn_precede_tool_results() -> None:
    scene = Scene(330)
    scene.request_leases(1, 2, 3)  # each holds 110 tokens, so all pages are leased
    scene.expected.turn = 200
    assert served(scene.request_lease(1, tokens=110, turn=1)) == []
    assert served(scene.request_lease(3, tokens=110)) == []
    assert served(scene.end(2, 20)) == [3]


def test_the_older_of_two_waiting_trajectories_with_a_cache_is_first() -> None:
    scene = Scene(220)
    scene.request_leases(1, 2)
    scene.pause(2, 110)
    scene.pause(1, 110)
    scene.expected.turn = 110
    scene.now = 0.1
    first = scene.request_lease(2, tokens=111, turn=1)
    assert (served(first), released(first)) == ([2], [1])  # trajectory 1 is idle, so its cache is evicted
    scene.now = 0.2
    assert served(scene.request_lease(1, tokens=111, turn=1)) == []


def test_the_cache_that_is_idle_longest_is_evicted_first() -> None:
    scene = Scene(330)
    scene.request_leases(1, 2, 3)
    scene.pause(2, 110)
    scene.pause(1, 110)
    effects = scene.request_lease(3, tokens=110)  # the turn of trajectory 3 continues
    assert (released(effects), served(effects)) == ([2], [3])
    grant = next(iter(granted(effects)))
    assert grant.reason == "continues its turn"


def test_a_lease_is_shortened_to_the_free_room() -> None:
    scene = Scene(300)
    scene.request_leases(1, 2)  # 220 tokens are leased
    scene.expected.turn = 300
    (grant,) = granted(scene.request_lease(1, tokens=110))
    assert grant.tokens == 110 + 80
    assert "limited by the room" in grant.reason


def test_after_a_delay_the_youngest_waiting_trajectory_is_preempted_but_never_the_oldest() -> None:
    scene = Scene(220)
    scene.request_leases(1, 2)
    assert served(scene.request_lease(1, tokens=110)) == []  # trajectory 2 runs and can free room
    scene.now = 0.5
    assert released(scene.request_lease(2, tokens=110)) == [2]  # no trajectory runs, so no room will become free


def test_a_waiting_trajectory_does_not_preempt_while_another_runs() -> None:
    scene = Scene(330)
    scene.request_leases(1, 2, 3)
    assert not released([*scene.request_lease(1, tokens=110), *scene.request_lease(2, tokens=110)])
    scene.now = 0.9
    assert not released(scene.decide(load(decode_steps=1)))
    scene.now = 1.1
    effects = scene.decide(load(decode_steps=2))
    assert (released(effects), served(effects)) == ([2], [1])
    deferrals = [effect.message for effect in effects if isinstance(effect.message, LeaseDeferred)]
    assert deferrals == [LeaseDeferred(2, "an older trajectory needs its pages")]


def test_an_evicted_trajectory_precedes_new_trajectories_on_any_engine_with_room() -> None:
    scene = Scene(220)
    scene.request_leases(1, 2, 3)
    scene.request_lease(1, tokens=110)
    scene.request_lease(2, tokens=110)  # trajectory 2 is evicted for trajectory 1
    effects = scene.decide(joined(1, 220))
    assert [(grant.trajectory_id, grant.engine) for grant in granted(effects)] == [(2, "generator-1")]
    assert granted(effects)[0].reason == "there is room to recompute its cache"


def test_an_evicted_trajectory_is_placed_immediately_if_there_is_room() -> None:
    scene = Scene(220, 1000)
    scene.expected.final = {50: 990.0}
    scene.request_lease(9, group=50)  # trajectory 9 starts on the larger engine
    scene.request_leases(1, 2)
    scene.pause(1, 110)
    assert released(scene.request_lease(2, tokens=110)) == [1]
    scene.end(9, PROMPT)
    (grant,) = granted(scene.request_lease(1, tokens=120, turn=1))
    assert grant.engine == "generator-1"


def test_a_few_members_of_each_group_start_before_the_longest_group() -> None:
    scene = Scene()
    scene.expected.final = {0: 150.0, 1: 300.0}
    for tid in range(16):
        scene.request_lease(tid, tid % 2)
    effects = scene.decide(joined(0, 100_000))
    order = [tid % 2 for tid in served(effects)]
    assert order[:8].count(0) == order[:8].count(1) == 4  # the first four members of both groups
    assert order[8:] == [1] * 4 + [0] * 4
    assert [tid for tid in served(effects) if tid % 2] == sorted(tid for tid in range(16) if tid % 2)


def test_in_an_oversampled_step_the_group_with_the_fewest_trajectories_left_is_first() -> None:
    scene = Scene(330, completes=True)  # room for three trajectories at a time
    scene.expected.final = {0: 100.0, 1: 110.0}
    for tid in range(8):
        scene.request_lease(tid, tid // 4)
    assert [tid for tid, holding in scene.arbiter.ledger.accounts.items() if holding.state == "running"] == [0, 1, 2]
    assert served(scene.end(0, 20)) == [3]  # trajectory 3 is the last of group 0, although group 1 is longer
    assert served(scene.end(1, 20)) == [4]
    assert served(scene.end(2, 20)) == [5]


def test_a_trajectory_that_would_exceed_the_expected_peak_demand_does_not_start() -> None:
    scene = Scene(1000, turn=50)
    scene.expected.final = {0: 450.0}
    assert served(scene.request_lease(1, 0)) == [1]
    assert served(scene.request_lease(2, 0)) == [2]
    assert served(scene.request_lease(3, 0)) == []  # 60 tokens would fit now, but the expected 3 * 450 tokens would not
    assert served(scene.end(1, 60)) == [3]


def test_no_trajectory_starts_on_an_engine_where_trajectories_with_a_cache_wait() -> None:
    scene = Scene(230)
    scene.request_leases(1, 2)
    scene.expected.turn = 400
    assert served(scene.request_lease(1, tokens=110)) == []
    scene.expected.turn = 5
    (deferred,) = scene.request_lease(3, tokens=PROMPT)
    assert isinstance(deferred.message, LeaseDeferred)


def test_an_empty_engine_takes_a_new_trajectory_despite_more_expected_room_elsewhere() -> None:
    scene = Scene(120, 1200, turn=50)
    scene.expected.final = {0: 990.0, 1: 700.0}
    assert granted(scene.request_lease(1, 0))[0].engine == "generator-1"
    # The only trajectory of an engine can have any expected length.
    assert granted(scene.request_lease(2, 0))[0].engine == "generator-0"


def test_the_only_trajectory_of_an_engine_gets_all_remaining_room() -> None:
    scene = Scene(1000, turn=985)
    scene.request_lease(1)
    scene.decide(load())
    for number in range(1, 5):
        scene.decide(load(evicted_tokens=number))  # the usable capacity shrinks
    (grant,) = granted(scene.request_lease(1, tokens=995))
    assert isinstance(grant, LeaseGranted)
    assert grant.tokens == 1000


@pytest.mark.parametrize("ending", ["end", "ask"])
def test_stale_heap_entries_are_ignored(ending: str) -> None:
    scene = Scene(220)
    scene.request_leases(1, 2)
    scene.request_lease(1, tokens=110)  # trajectory 1 waits and keeps its cache
    effects = scene.end(1, 110) if ending == "end" else scene.request_lease(2, tokens=110)
    assert served(effects) == ([] if ending == "end" else [1])
    assert scene.arbiter.policy.decide_next(scene.now) is None


def test_siblings_share_an_engine_while_the_engine_has_room() -> None:
    scene = Scene(6000, 6100, 5000)
    scene.expected.final = {0: 500.0}
    where = [granted(scene.request_lease(tid, 0))[0].engine for tid in range(6)]
    assert where == ["generator-1"] * 4 + ["generator-0"] * 2


def test_a_trajectory_migrates_from_the_slowest_engine_to_the_fastest() -> None:
    scene = Scene(4000, 4000)
    start_equally_long(scene, 4)
    where = {tid: scene.arbiter.ledger.accounts[tid].engine for tid in range(4)}
    first, second = (tid for tid, engine in where.items() if engine is scene.arbiter.ledger.engines["generator-0"])
    for tid in {*where} - {first, second}:
        scene.end(tid, 20)
    report_both(scene, 10)
    scene.pause(first, 110)
    moves = scene.request_lease(first, tokens=111, turn=1)
    assert (released(moves), granted(moves)[0].engine) == ([first], "generator-1")
    assert granted(moves)[0].reason == "generator-0 is expected to finish last, and generator-1 first"
    # Both engines now finish together.
    assert granted(scene.request_lease(second, tokens=110))[0].engine == "generator-0"


def test_no_trajectory_migrates_while_others_wait_to_start() -> None:
    scene = Scene(4000, 1100)
    start_equally_long(scene, 6)
    holdings = scene.arbiter.ledger.accounts
    assert holdings[5].state == "waiting"
    report_both(scene, 10)
    assert granted(scene.request_lease(0, tokens=110))[0].engine == "generator-0"
    scene.end(5, PROMPT)
    assert granted(scene.request_lease(1, tokens=110))[0].engine == "generator-1"


def report_both(scene: Scene, number: int) -> None:
    """Report ten more steps of both engines; each cached token costs a microsecond, and nothing else costs time."""
    for engine in ("generator-0", "generator-1"):
        scene.decide(load(engine, decode_steps=10 * number, busy_s=0.1 * number**2, used_tokens=20_000 * number))


def start_equally_long(scene: Scene, count: int) -> None:
    """Start trajectories of separate groups, on engines with known costs."""
    scene.expected.final = dict.fromkeys(range(count), 1000.0)
    for number in range(10):
        report_both(scene, number)
    for tid in range(count):
        scene.request_lease(tid, tid)


def test_an_oversold_engine_evicts_down_to_its_usable_pages() -> None:
    scene = Scene(1000, turn=240)
    scene.request_leases(1, 2, 3, 4)  # each holds 250 tokens, so all pages are leased
    for tid in (2, 3, 4):
        scene.pause(tid, 250)
    scene.arbiter.decide(0.0, load())
    for number in range(1, 7):
        scene.arbiter.decide(0.0, load(evicted_tokens=number))  # 732 tokens stay usable
    effects = scene.request_lease(1, tokens=250)
    assert released(effects) == [2, 3]  # one eviction would not be enough
    assert served(effects) == [1]

"""The simulated engine: its closed form is a loop over tokens, its pages are those that its sequences have."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest

from analysis.simulation.engine import SimulatedEngine
from analysis.simulation.model import CLUSTERS, Cluster, Cost
from analysis.simulation.workload import Plan, Turn, plan_of
from bus.messages import EngineLoadReported, ProtocolError, TurnGenerated, TurnRequested

COST = Cost(fixed_s=0.002, weights_s=0.01, token_s=0.001, sequence_s=1e-4, kv_token_s=1e-5, pair_s=1e-6)
PAGE = 4


def cluster(**changes: Any) -> Cluster:
    settings: dict[str, Any] = {"page_tokens": PAGE, "max_running": 6, "chunk_tokens": 16, **changes}
    return Cluster("test", 1, settings.pop("kv_tokens", 100_000), COST, **settings)


class OneEngine:
    """Implements analysis.simulation.engine.World."""

    def __init__(self, plans: list[Plan], cluster: Cluster) -> None:
        self.now = 0.0
        self.plans = {plan.trajectory_id: plan for plan in plans}
        self.computed: dict[int, int] = {}
        self.answers: dict[int, float] = {}
        self.turns: list[TurnGenerated] = []
        self.reports: list[EngineLoadReported] = []
        self.check: Callable[[], None] = lambda: None
        self.engine = SimulatedEngine("generator-0", cluster, self)
        self._events: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._numbers = count()

    def call_at(self, at: float, callback: Callable[[Any], None], argument: Any) -> None:
        heapq.heappush(self._events, (at, next(self._numbers), callback, argument))

    def answer(self, turn: TurnGenerated) -> None:
        self.answers[turn.trajectory_id] = self.now
        self.turns.append(turn)

    def load(self, report: EngineLoadReported) -> None:
        self.reports.append(report)

    def request(
        self, trajectory_id: int, tokens: int, max_new_tokens: int = 10_000, turn: int = 0, lease: int = 1
    ) -> None:
        ids = bytes(4 * tokens)
        self.engine.request(TurnRequested(trajectory_id, turn, lease, ids, max_new_tokens, 1.0, 1.0, 0, (0,), 0))

    def run(self) -> None:
        while self._events:
            self.now, _, callback, argument = heapq.heappop(self._events)
            callback(argument)
            self.check()


def one_turn(trajectory_id: int, prompt_tokens: int, tokens: int, group_id: int | None = None) -> Plan:
    group = trajectory_id if group_id is None else group_id
    return plan_of(trajectory_id, group, prompt_tokens, [Turn(tokens)], 10_000)


def drawn(seed: int, trajectories: int = 12, siblings: int = 1) -> list[tuple[float, Plan]]:
    """Arrivals and plans."""
    draw = random.Random(seed)
    prompts = [draw.randint(1, 40) for _ in range(trajectories)]
    plans = [one_turn(n, prompts[n // siblings], draw.randint(1, 60), n // siblings) for n in range(trajectories)]
    return [(draw.uniform(0, 1.5), plan) for plan in plans]


def ends_by_a_loop(arrivals: list[tuple[float, Plan]], cluster: Cluster) -> dict[int, float]:
    """What the engine does, one step and one token at a time; memory never runs out."""
    coming = sorted(arrivals, key=lambda arrival: arrival[0])
    queue: list[Plan] = []
    batch: list[list[Any]] = []  # [plan, tokens, left to prefill]
    ends: dict[int, float] = {}
    now = 0.0
    while coming or queue or batch:
        if not (queue or batch):
            now = max(now, coming[0][0])
        while coming and coming[0][0] <= now:
            queue.append(coming.pop(0)[1])
        while queue and len(batch) < cluster.max_running:
            plan = queue.pop(0)
            batch.append([plan, plan.prompt_tokens, plan.prompt_tokens])
        room, pairs, read, sequences, prefill = cluster.chunk_tokens, 0.0, 0, 0, 0
        decoding = [each for each in batch if not each[2]]
        stepped = list(decoding)
        for each in decoding:
            read, sequences = read + each[1], sequences + 1
        for each in batch:
            if each[2] and room:
                tokens, before = min(room, each[2]), each[1] - each[2]
                pairs += (tokens - 1) * (before + tokens / 2)
                read, sequences, prefill = read + before + tokens, sequences + 1, prefill + tokens - 1
                each[2] -= tokens
                room -= tokens
                if not each[2]:
                    stepped.append(each)
        now += cluster.cost.step_s(sequences, read, prefill, pairs)
        for each in stepped:
            each[1] += 1
            if each[1] == each[0].final_tokens:
                ends[each[0].trajectory_id] = now
                batch.remove(each)
    return ends


@pytest.mark.parametrize("seed", range(12))
def test_turns_end_when_a_loop_over_steps_and_tokens_ends_them(seed: int) -> None:
    arrivals = drawn(seed)
    world = OneEngine([plan for _, plan in arrivals], cluster())
    for at, plan in arrivals:
        world.call_at(at, lambda each: world.request(each.trajectory_id, each.prompt_tokens), plan)
    world.run()
    expected = ends_by_a_loop(arrivals, cluster())
    assert world.answers == pytest.approx(expected, rel=1e-9)
    assert world.engine.generated_tokens == sum(plan.generated_tokens for _, plan in arrivals)


@pytest.mark.parametrize("seed", range(12))
def test_used_pages_are_those_that_the_sequences_have_and_never_more_than_there_are(seed: int) -> None:
    arrivals = drawn(seed, siblings=3)
    tight = cluster(kv_tokens=160)  # of up to 100 that a trajectory needs
    world = OneEngine([plan for _, plan in arrivals], tight)
    engine = world.engine
    for at, plan in arrivals:
        world.call_at(at, lambda each: world.request(each.trajectory_id, each.prompt_tokens), plan)

    def recount() -> None:
        engine.settle()
        own = sum(engine.pages.own(each, each.tokens + engine._steps) for each in engine.running.values())  # pyright: ignore[reportPrivateUsage]
        resting = [*engine.prefilling.values(), *engine.pages.parked.values()]
        groups = {each.group_id: each.shared_pages for each in (*engine.running.values(), *resting)}
        assert engine.pages.used == own + sum(each.pages for each in resting) + sum(groups.values())
        assert engine.pages.used <= engine.pages.capacity
        assert engine.pages.reclaimable == sum(each.pages for each in engine.pages.parked.values())

    world.check = recount
    world.run()
    assert set(world.answers) == {plan.trajectory_id for _, plan in arrivals}
    assert engine.pages.evictions > 0


def test_a_preempted_sequence_ends_with_the_same_tokens_and_what_it_had_is_computed_again() -> None:
    plans = [one_turn(n, 8, 60) for n in range(3)]
    world = OneEngine(plans, cluster(kv_tokens=120))
    for plan in plans:
        world.request(plan.trajectory_id, 8)
    world.run()
    assert world.engine.preempted > 0
    assert world.engine.recomputed_tokens > 0
    assert sorted(len(turn.token_ids) // 4 for turn in world.turns) == [60, 60, 60]
    assert world.engine.generated_tokens == 180


def test_siblings_compute_their_prompts_whole_pages_once() -> None:
    plans = [one_turn(n, 30, 5, group_id=0) for n in range(4)]
    world = OneEngine(plans, cluster())
    for plan in plans:
        world.request(plan.trajectory_id, 30)
    world.run()
    assert world.engine.prefilled_tokens == 30 + 3 * (30 % PAGE)
    assert world.engine.recomputed_tokens == 0


def test_a_turn_goes_on_from_its_cache_where_its_lease_ended() -> None:
    world = OneEngine([one_turn(0, 10, 50)], cluster())
    world.request(0, 10, max_new_tokens=20)
    world.run()
    assert [turn.finish for turn in world.turns] == ["length"]
    world.request(0, 30, lease=2)
    world.run()
    assert [turn.finish for turn in world.turns] == ["length", "stop"]
    assert world.engine.prefilled_tokens == 10 + 1  # the last one was drawn and not read
    assert world.engine.recomputed_tokens == 0


def test_a_cache_is_kept_where_a_later_request_came_than_the_one_whose_cache_is_given_up() -> None:
    world = OneEngine([plan_of(0, 0, 10, [Turn(5, 0.1, 5), Turn(5)], 100)], cluster())
    world.request(0, 10)
    world.run()
    world.request(0, 20, turn=1, lease=2)
    world.engine.forget(0, lease=1)
    world.run()
    assert world.engine.recomputed_tokens == 0
    world.engine.forget(0, lease=2)
    assert world.engine.pages.used == 0


def test_a_cache_in_use_is_not_forgotten() -> None:
    world = OneEngine([one_turn(0, 10, 50)], cluster())
    world.request(0, 10)
    with pytest.raises(ProtocolError, match="while it generates"):
        world.engine.forget(0)


def test_reports_come_while_it_works_and_count_all_that_it_did() -> None:
    world = OneEngine([one_turn(0, 10, 200)], cluster())
    world.request(0, 10)
    world.run()
    last = world.reports[-1]
    assert (last.running, last.generated_tokens, last.prefilled_tokens) == (0, 200, 10)
    assert last.busy_s == pytest.approx(world.answers[0])
    assert len(world.reports) == 1 + int(world.answers[0] / 0.25)


@pytest.mark.parametrize("name", CLUSTERS)
def test_so_many_steps_fit_into_the_time_that_they_take(name: str) -> None:
    cost = CLUSTERS[name].cost
    for running, kv_tokens, steps in ((1, 100, 1), (256, 700_000, 317), (512, 10_000, 5000)):
        looped = sum(cost.step_s(running, kv_tokens + running * step) for step in range(steps))
        assert cost.steps_s(running, kv_tokens, steps) == pytest.approx(looped)
        assert cost.steps_within(running, kv_tokens, looped * (1 + 1e-9)) == steps
        assert cost.steps_within(running, kv_tokens, looped * (1 - 1e-9)) == steps - 1

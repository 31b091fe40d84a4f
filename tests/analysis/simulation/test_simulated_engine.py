"""The simulated engine: its closed form matches a loop over tokens, its page count its sequences."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from analysis.simulation.cluster_model import CLUSTERS, SimulatedCluster, StepCostModel
from analysis.simulation.simulated_engine import SimulatedEngine
from analysis.simulation.timeline import VirtualTimeline
from analysis.simulation.workload import PlannedTurn, TrajectoryPlan, build_plan
from bus.messages import EngineLoadReported, ProtocolError, TurnGenerated, TurnRequested

COST = StepCostModel(fixed_s=0.002, weights_s=0.01, token_s=0.001, sequence_s=1e-4, kv_token_s=1e-5, pair_s=1e-6)
PAGE = 4


def cluster(**changes: Any) -> SimulatedCluster:
    settings: dict[str, Any] = {"page_tokens": PAGE, "max_running": 6, "chunk_tokens": 16, **changes}
    return SimulatedCluster("test", 1, settings.pop("kv_tokens", 100_000), COST, **settings)


class OneEngine:
    """Implements analysis.simulation.simulated_engine.EngineEnvironment."""

    def __init__(self, plans: list[TrajectoryPlan], cluster: SimulatedCluster) -> None:
        self.timeline = VirtualTimeline()
        self.plans: Mapping[int, TrajectoryPlan] = {plan.trajectory_id: plan for plan in plans}
        self.computed_tokens: dict[int, int] = {}
        self.answers: dict[int, float] = {}
        self.turns: list[TurnGenerated] = []
        self.reports: list[EngineLoadReported] = []
        self.check: Callable[[], None] = lambda: None
        self.engine = SimulatedEngine("generator-0", cluster, self)

    def deliver_turn(self, turn: TurnGenerated) -> None:
        self.answers[turn.trajectory_id] = self.timeline.now
        self.turns.append(turn)

    def report_load(self, report: EngineLoadReported) -> None:
        self.reports.append(report)

    def request(
        self, trajectory_id: int, tokens: int, max_new_tokens: int = 10_000, turn: int = 0, lease: int = 1
    ) -> None:
        ids = bytes(4 * tokens)
        self.engine.submit(TurnRequested(trajectory_id, turn, lease, ids, max_new_tokens, 1.0, 1.0, 0, (0,), 0))

    def run(self) -> None:
        self.timeline.run(lambda: self.check())


def one_turn(trajectory_id: int, prompt_tokens: int, tokens: int, group_id: int | None = None) -> TrajectoryPlan:
    group = trajectory_id if group_id is None else group_id
    return build_plan(trajectory_id, group, prompt_tokens, [PlannedTurn(tokens)], 10_000)


def drawn(seed: int, trajectories: int = 12, siblings: int = 1) -> list[tuple[float, TrajectoryPlan]]:
    """Arrivals and plans."""
    draw = random.Random(seed)
    prompts = [draw.randint(1, 40) for _ in range(trajectories)]
    plans = [one_turn(n, prompts[n // siblings], draw.randint(1, 60), n // siblings) for n in range(trajectories)]
    return [(draw.uniform(0, 1.5), plan) for plan in plans]


def ends_by_a_loop(arrivals: list[tuple[float, TrajectoryPlan]], cluster: SimulatedCluster) -> dict[int, float]:
    """What the engine does, one step and one token at a time; memory never runs out."""
    coming = sorted(arrivals, key=lambda arrival: arrival[0])
    queue: list[TrajectoryPlan] = []
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
        now += cluster.cost.compute_step_s(sequences, read, prefill, pairs)
        for each in stepped:
            each[1] += 1
            if each[1] == each[0].final_tokens:
                ends[each[0].trajectory_id] = now
                batch.remove(each)
    return ends


@pytest.mark.parametrize("seed", range(12))
def test_turns_end_at_the_same_time_as_in_a_loop_over_steps(seed: int) -> None:
    arrivals = drawn(seed)
    world = OneEngine([plan for _, plan in arrivals], cluster())
    for at, plan in arrivals:
        world.timeline.call_at(at, lambda each: world.request(each.trajectory_id, each.prompt_tokens), plan)
    world.run()
    expected = ends_by_a_loop(arrivals, cluster())
    assert world.answers == pytest.approx(expected, rel=1e-9)
    assert world.engine.generated_tokens == sum(plan.generated_tokens for _, plan in arrivals)


@pytest.mark.parametrize("seed", range(12))
def test_used_pages_match_the_sequences_and_never_exceed_the_cache(seed: int) -> None:
    arrivals = drawn(seed, siblings=3)
    tight = cluster(kv_tokens=160)  # of up to 100 that a trajectory needs
    world = OneEngine([plan for _, plan in arrivals], tight)
    engine = world.engine
    for at, plan in arrivals:
        world.timeline.call_at(at, lambda each: world.request(each.trajectory_id, each.prompt_tokens), plan)

    def recount() -> None:
        engine.update_counters()
        own = sum(
            engine.kv_cache.count_own_pages(each, each.tokens + engine.running.completed_steps)
            for each in engine.running.sequences.values()
        )  # pyright: ignore[reportPrivateUsage]
        resting = [*engine.prefilling.values(), *engine.kv_cache.idle.values()]
        groups = {each.group_id: each.shared_pages for each in (*engine.running.sequences.values(), *resting)}
        assert engine.kv_cache.used_pages == own + sum(each.own_pages for each in resting) + sum(groups.values())
        assert engine.kv_cache.used_pages <= engine.kv_cache.num_pages
        assert engine.kv_cache.reclaimable_pages == sum(each.own_pages for each in engine.kv_cache.idle.values())

    world.check = recount
    world.run()
    assert set(world.answers) == {plan.trajectory_id for _, plan in arrivals}
    assert engine.kv_cache.evictions > 0


def test_a_preempted_sequence_is_recomputed_and_ends_with_the_same_tokens() -> None:
    plans = [one_turn(n, 8, 60) for n in range(3)]
    world = OneEngine(plans, cluster(kv_tokens=120))
    for plan in plans:
        world.request(plan.trajectory_id, 8)
    world.run()
    assert world.engine.preempted > 0
    assert world.engine.recomputed_tokens > 0
    assert sorted(len(turn.token_ids) // 4 for turn in world.turns) == [60, 60, 60]
    assert world.engine.generated_tokens == 180


def test_siblings_compute_the_full_pages_of_their_prompt_once() -> None:
    plans = [one_turn(n, 30, 5, group_id=0) for n in range(4)]
    world = OneEngine(plans, cluster())
    for plan in plans:
        world.request(plan.trajectory_id, 30)
    world.run()
    assert world.engine.prefilled_tokens == 30 + 3 * (30 % PAGE)
    assert world.engine.recomputed_tokens == 0


def test_a_turn_continues_from_its_cache_after_its_lease_ended() -> None:
    world = OneEngine([one_turn(0, 10, 50)], cluster())
    world.request(0, 10, max_new_tokens=20)
    world.run()
    assert [turn.finish for turn in world.turns] == ["length"]
    world.request(0, 30, lease=2)
    world.run()
    assert [turn.finish for turn in world.turns] == ["length", "stop"]
    assert world.engine.prefilled_tokens == 10 + 1  # the last one was drawn and not read
    assert world.engine.recomputed_tokens == 0


def test_a_stale_cache_release_is_ignored() -> None:
    world = OneEngine([build_plan(0, 0, 10, [PlannedTurn(5, 0.1, 5), PlannedTurn(5)], 100)], cluster())
    world.request(0, 10)
    world.run()
    world.request(0, 20, turn=1, lease=2)
    world.engine.release_cache(0, lease=1)
    world.run()
    assert world.engine.recomputed_tokens == 0
    world.engine.release_cache(0, lease=2)
    assert world.engine.kv_cache.used_pages == 0


def test_a_cache_in_use_cannot_be_released() -> None:
    world = OneEngine([one_turn(0, 10, 50)], cluster())
    world.request(0, 10)
    with pytest.raises(ProtocolError, match="while it generates"):
        world.engine.release_cache(0)


def test_a_working_engine_reports_all_its_work() -> None:
    world = OneEngine([one_turn(0, 10, 200)], cluster())
    world.request(0, 10)
    world.run()
    last = world.reports[-1]
    assert (last.running, last.generated_tokens, last.prefilled_tokens) == (0, 200, 10)
    assert last.busy_s == pytest.approx(world.answers[0])
    assert len(world.reports) == 1 + int(world.answers[0] / 0.25)


@pytest.mark.parametrize("name", CLUSTERS)
def test_count_steps_within_inverts_compute_steps_s(name: str) -> None:
    cost = CLUSTERS[name].cost
    for running, kv_tokens, steps in ((1, 100, 1), (256, 700_000, 317), (512, 10_000, 5000)):
        looped = sum(cost.compute_step_s(running, kv_tokens + running * step) for step in range(steps))
        assert cost.compute_steps_s(running, kv_tokens, steps) == pytest.approx(looped)
        assert cost.count_steps_within(running, kv_tokens, looped * (1 + 1e-9)) == steps
        assert cost.count_steps_within(running, kv_tokens, looped * (1 - 1e-9)) == steps - 1

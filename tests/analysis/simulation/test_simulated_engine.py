"""The simulated engine computes many steps in closed form, with the results of a loop over single steps."""

import random
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import pytest

from asterism.analysis.simulation.cluster_model import CLUSTERS, SimulatedCluster, StepCostModel
from asterism.analysis.simulation.simulated_engine import SimulatedEngine
from asterism.analysis.simulation.synthetic_tokens import build_trajectory_ids
from asterism.analysis.simulation.timeline import VirtualTimeline
from asterism.analysis.simulation.workload import PlannedTurn, TrajectoryPlan, build_plan
from asterism.bus.messages import EngineLoadReported, ProtocolError, TurnGenerated, TurnRequested
from asterism.configs.schema.algorithm import Sampling
from asterism.engine.inference.scheduler import Scheduler
from asterism.engine.prefix_tracker import PrefixTracker

COST = StepCostModel(fixed_s=0.002, weights_s=0.01, token_s=0.001, sequence_s=1e-4, kv_token_s=1e-5, pair_s=1e-6)
PAGE = 4


def cluster(**changes: Any) -> SimulatedCluster:
    settings: dict[str, Any] = {"page_tokens": PAGE, "max_running": 6, "chunk_tokens": 16, **changes}
    return SimulatedCluster("test", 1, settings.pop("kv_tokens", 100_000), COST, **settings)


class OneEngine:
    """Implements asterism.analysis.simulation.simulated_engine.EngineEnvironment."""

    def __init__(self, plans: list[TrajectoryPlan], cluster: SimulatedCluster) -> None:
        self.timeline = VirtualTimeline()
        self.plans: Mapping[int, TrajectoryPlan] = {plan.trajectory_id: plan for plan in plans}
        self.prefix_tracker = PrefixTracker()
        self.answers: dict[int, float] = {}
        self.turns: list[TurnGenerated] = []
        self.reports: list[EngineLoadReported] = []
        self.check: Callable[[], None] = lambda: None
        self.token_ids = {
            plan.trajectory_id: build_trajectory_ids(plan.group_id, plan.prompt_tokens).tobytes() for plan in plans
        }
        self.engine = SimulatedEngine("generator-0", cluster, self)

    def deliver_turn(self, turn: TurnGenerated) -> None:
        self.answers[turn.trajectory_id] = self.timeline.now
        self.turns.append(turn)
        self.token_ids[turn.trajectory_id] += turn.token_ids

    def report_load(self, report: EngineLoadReported) -> None:
        self.reports.append(report)

    def request(self, trajectory_id: int, max_new_tokens: int = 10_000, turn: int = 0, lease: int = 1) -> None:
        ids = self.token_ids[trajectory_id]
        self.engine.submit(TurnRequested(trajectory_id, turn, lease, ids, max_new_tokens, Sampling(), (0,), 0))

    def run(self, arrivals: list[tuple[float, TrajectoryPlan]] | None = None) -> None:
        for at, plan in arrivals or []:
            self.timeline.call_at(at, self.request, plan.trajectory_id)
        self.timeline.run(lambda: self.check())


def one_turn(trajectory_id: int, prompt_tokens: int, tokens: int, group_id: int | None = None) -> TrajectoryPlan:
    group = trajectory_id if group_id is None else group_id
    return build_plan(trajectory_id, group, prompt_tokens, [PlannedTurn(tokens)], 10_000)


def ran(plan: TrajectoryPlan, max_new_tokens: int = 10_000) -> OneEngine:
    """Return an engine that has generated the first turn of the plan."""
    world = OneEngine([plan], cluster())
    world.request(plan.trajectory_id, max_new_tokens)
    world.run()
    return world


def drawn(seed: int, trajectories: int = 12, siblings: int = 1) -> list[tuple[float, TrajectoryPlan]]:
    """Draw arrivals and plans."""
    draw = random.Random(seed)
    prompts = [draw.randint(1, 40) for _ in range(trajectories)]
    plans = [one_turn(n, prompts[n // siblings], draw.randint(1, 60), n // siblings) for n in range(trajectories)]
    return [(draw.uniform(0, 1.5), plan) for plan in plans]


def ends_by_a_loop(arrivals: list[tuple[float, TrajectoryPlan]], cluster: SimulatedCluster) -> dict[int, float]:
    """Simulate the engine one step and one token at a time, with unlimited memory."""
    coming = sorted(arrivals, key=lambda arrival: arrival[0])
    queue: list[list[Any]] = []  # [plan, cached tokens]; the first sequence can be in prefill
    batch: list[list[Any]] = []
    ends: dict[int, float] = {}
    now = 0.0
    while coming or queue or batch:
        if not (queue or batch):
            now = max(now, coming[0][0])
        while coming and coming[0][0] <= now:
            queue.append([coming.pop(0)[1], 0])
        budget, pairs = cluster.chunk_tokens, 0.0
        while queue and budget and len(batch) < cluster.max_running:
            plan, start = queue[0]
            end = min(plan.prompt_tokens - 1, start + budget)
            pairs += sum(range(start + 1, end + 1))
            budget -= end - start
            queue[0][1] = end
            if end == plan.prompt_tokens - 1:
                batch.append(queue.pop(0))
        read = sum(cached + 1 for _, cached in batch)
        now += cluster.cost.compute_step_s(len(batch), read, cluster.chunk_tokens - budget, pairs)
        for each in batch[:]:
            each[1] += 1
            if each[1] == each[0].final_tokens - 1:
                ends[each[0].trajectory_id] = now
                batch.remove(each)
    return ends


@pytest.mark.parametrize("seed", range(12))
def test_turns_end_at_the_same_time_as_in_a_loop_over_steps(seed: int) -> None:
    arrivals = drawn(seed)
    world = OneEngine([plan for _, plan in arrivals], cluster())
    world.run(arrivals)
    assert world.answers == pytest.approx(ends_by_a_loop(arrivals, cluster()), rel=1e-9)
    assert world.engine.get_load().generated_tokens == sum(plan.generated_tokens for _, plan in arrivals)


@pytest.mark.parametrize("seed", range(12))
def test_steps_in_closed_form_equal_single_steps_when_pages_run_out(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    arrivals = drawn(seed, siblings=3)
    tight = cluster(kv_tokens=160)  # a trajectory needs up to 100 KV tokens
    skipping, stepping = (OneEngine([plan for _, plan in arrivals], tight) for _ in range(2))

    def check() -> None:
        skipping.engine.update_counters()
        assert skipping.engine.used_pages <= skipping.engine.num_pages

    skipping.check = check
    skipping.run(arrivals)
    monkeypatch.setattr(Scheduler, "count_steps_ahead", lambda _: 1)
    stepping.run(arrivals)
    assert skipping.answers == pytest.approx(stepping.answers)
    load = skipping.engine.get_load()
    assert load == msgspec.structs.replace(stepping.engine.get_load(), busy_s=load.busy_s)
    assert skipping.engine.used_page_s == pytest.approx(stepping.engine.used_page_s, rel=0.02)
    assert load.evicted_tokens > 0
    for plan in skipping.plans:
        skipping.engine.release_cache(plan)
    assert skipping.engine.used_pages == 0


def test_a_preempted_sequence_is_recomputed_and_ends_with_the_same_tokens() -> None:
    plans = [one_turn(n, 8, 60) for n in range(3)]
    world = OneEngine(plans, cluster(kv_tokens=120))
    world.run([(0.0, plan) for plan in plans])
    load = world.engine.get_load()
    assert min(load.preempted, load.recomputed_tokens) > 0
    assert sorted(len(turn.token_ids) // 4 for turn in world.turns) == [60, 60, 60]
    assert load.generated_tokens == 180


def test_siblings_compute_the_full_pages_of_their_prompt_once() -> None:
    plans = [one_turn(n, 30, 5, group_id=0) for n in range(4)]
    world = OneEngine(plans, cluster())
    world.run([(0.0, plan) for plan in plans])
    assert world.engine.get_load().prefilled_tokens == 30 + 3 * (30 % PAGE)
    assert world.engine.get_load().recomputed_tokens == 0


def test_a_turn_continues_from_its_cache_after_its_lease_ended() -> None:
    world = ran(one_turn(0, 10, 50), max_new_tokens=20)
    world.request(0, lease=2)
    world.run()
    assert [turn.finish for turn in world.turns] == ["length", "stop"]
    assert world.engine.get_load().prefilled_tokens == 10 + 1  # the last drawn token has no keys and values
    assert world.engine.get_load().recomputed_tokens == 0


def test_a_trajectory_that_migrates_is_recomputed() -> None:
    world = ran(one_turn(0, 10, 50), max_new_tokens=20)
    world.engine.release_cache(0)
    world.engine = SimulatedEngine("generator-1", cluster(), world)
    world.request(0, lease=2)
    world.run()
    assert world.engine.get_load().recomputed_tokens == 10 + 19


def test_a_stale_cache_release_is_ignored() -> None:
    world = ran(build_plan(0, 0, 10, [PlannedTurn(5, 0.1, 5), PlannedTurn(5)], 100))
    world.token_ids[0] += bytes(4 * 5)
    world.request(0, turn=1, lease=2)
    world.engine.release_cache(0, lease=1)
    world.run()
    assert world.engine.get_load().recomputed_tokens == 0
    world.engine.release_cache(0, lease=2)
    assert world.engine.used_pages == 0


def test_a_cache_in_use_cannot_be_released() -> None:
    world = OneEngine([one_turn(0, 10, 50)], cluster())
    world.request(0)
    with pytest.raises(ProtocolError, match="while it generates"):
        world.engine.release_cache(0)


def test_a_working_engine_reports_all_its_work() -> None:
    world = ran(one_turn(0, 10, 200))
    last = world.reports[-1]
    assert (last.running, last.generated_tokens, last.prefilled_tokens) == (0, 200, 10)
    assert last.busy_s == pytest.approx(world.answers[0])
    assert len(world.reports) == 1 + int(world.answers[0] / 0.25)


@pytest.mark.slow
def test_the_simulator_starts_without_torch() -> None:
    program = "import sys, asterism.analysis.simulation.simulate; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


@pytest.mark.parametrize("name", CLUSTERS)
def test_count_steps_within_inverts_compute_steps_s(name: str) -> None:
    cost = CLUSTERS[name].cost
    for running, kv_tokens, steps in ((1, 100, 1), (256, 700_000, 317), (512, 10_000, 5000)):
        looped = sum(cost.compute_step_s(running, kv_tokens + running * step) for step in range(steps))
        assert cost.compute_steps_s(running, kv_tokens, steps) == pytest.approx(looped)
        assert cost.count_steps_within(running, kv_tokens, looped * (1 + 1e-9)) == steps
        assert cost.count_steps_within(running, kv_tokens, looped * (1 - 1e-9)) == steps - 1

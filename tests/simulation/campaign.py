"""Small runs in which anything may happen to anybody, each as its seed says."""

from __future__ import annotations

import random
from typing import get_args

from msgspec.structs import replace

from bus.messages import RunFinished
from configs.schema import Arbiter, Bus, Dialogue, Engine, Evaluation, Learner, Rl, Run, Sandbox
from configs.sglang import Sglang
from policies.scheduling import PolicyName
from tests.simulation.clock import run_virtually
from tests.simulation.invariants import check
from tests.simulation.world import Faults, World

RUN = Run(
    name="simulated",
    dialogue=Dialogue(prompt_tokens=16, response_tokens=400, max_calls_per_turn=2),
    engine=Engine(kv_tokens=1024, num_engines=2),
    sandbox=Sandbox(executors=2),
    rl=Rl(steps=2, prompts=2, rollouts=2, refills=1),
)
RL = (
    RUN.rl,
    replace(RUN.rl, oversubscribe=1.5),  # what is left over is stopped
    replace(RUN.rl, max_staleness=1, oversubscribe=1.5, leftovers="carry"),
    replace(RUN.rl, max_staleness=2),
)
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)


def plan(seed: int) -> tuple[Run, Faults]:
    """Each policy with each kind of step in turn; each kind of fault now and then, often, or never."""
    draw = random.Random(seed)

    def often(rate: float) -> float:
        return rate * draw.choice([0.0, 1.0, 2.0])

    faults = Faults(
        lags=often(0.01),
        breaks=often(0.01),
        repeats=often(0.02),
        engine_deaths=often(0.03),
        executor_deaths=often(0.03),
        learner_deaths=often(0.05),
        decider_deaths=often(0.004),
        false_starts=often(0.05),
        disasters=often(0.02),
        partitions=often(0.1),
        evictions=often(0.03),
    )
    policy, rl = POLICIES[seed % len(POLICIES)], RL[seed % len(RL)]
    window = draw.choice([65_536, 4 * rl.live_groups * rl.rollouts])  # the least that a run may have
    run = replace(
        RUN, evaluation=Evaluation(draw.choice([0, 0, 0, 1])), learner=Learner(checkpoint_every=draw.choice([1, 2]))
    )
    if not rl.max_staleness and draw.random() < 0.5:
        run = replace(run, engine=replace(run.engine, kind="sglang"), sglang=Sglang(colocate=True))
    return replace(run, arbiter=Arbiter(policy), rl=rl, bus=Bus(window)), faults


def world_of(seed: int) -> World:
    run, faults = plan(seed)
    return World(run, seed, trouble=0.03, faults=faults)


def play(world: World) -> World:
    """To its end. Raises what breaks an invariant."""
    assert run_virtually(world.live()) == RunFinished(world.run.rl.steps)
    check(world)
    return world

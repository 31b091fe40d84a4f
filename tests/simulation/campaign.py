"""Small runs with faults of every kind in all processes. A seed determines the faults."""

import random
from typing import get_args

from msgspec.structs import replace

from asterism.configs.schema.algorithm import EvaluationConfig, RlConfig, RocConfig
from asterism.configs.schema.machines import ArbiterConfig, BusConfig
from asterism.configs.schema.run_config import RunConfig
from asterism.configs.schema.schema_tree import replace_keys
from asterism.configs.schema.sglang import SGLangConfig
from asterism.policies.arbiter.arbiter import PolicyName
from tests.engine.learner.learner_settings import make_learner
from tests.simulation.invariants import check
from tests.simulation.small_run import SMALL
from tests.simulation.world import Faults, World

RUN = replace_keys(
    SMALL,
    {
        **{"dialogue.max_calls_per_turn": 2, "engine.kv_tokens": 1024, "sandbox.executors": 2, "roc.enabled": False},
        "rl": RlConfig(steps=2, prompts=2, rollouts=2, max_refill_groups=1),
    },
)
RL = (
    RUN.rl,
    replace(RUN.rl, group_oversampling=1.5),  # surplus groups are aborted
    replace(RUN.rl, max_staleness=1, group_oversampling=1.5, surplus_groups="carry"),
    replace(RUN.rl, max_staleness=2),
)
RATES = {
    **{"lags": 0.01, "breaks": 0.01, "repeats": 0.02, "engine_deaths": 0.03, "executor_deaths": 0.03},
    **{"learner_deaths": 0.05, "decider_deaths": 0.004, "false_starts": 0.05, "disasters": 0.02},
    **{"partitions": 0.1, "evictions": 0.03},
}
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)


def plan(seed: int) -> tuple[RunConfig, Faults]:
    """Choose policy and kind of step by seed, and draw a rate for each fault."""
    draw = random.Random(seed)
    faults = Faults(**{name: rate * draw.choice([0.0, 1.0, 2.0]) for name, rate in RATES.items()})
    policy, rl = POLICIES[seed % len(POLICIES)], RL[seed % len(RL)]
    window = draw.choice([65_536, 4 * rl.max_groups_in_flight * rl.rollouts])  # a large or the smallest possible window
    run = replace(
        RUN, evaluation=EvaluationConfig(draw.choice([0, 0, 0, 1])), learner=make_learner(every=draw.choice([1, 2]))
    )
    if not rl.max_staleness and draw.random() < 0.5:
        run = replace(run, engine=replace(run.engine, kind="sglang"), sglang=SGLangConfig(colocate=True))
    run = replace(run, arbiter=ArbiterConfig(policy), rl=rl, bus=BusConfig(window))
    return (_resample(run) if draw.random() < 0.25 else run), faults


def _resample(run: RunConfig) -> RunConfig:
    """Enable RoC, which needs groups of four. Double the bus window, because the groups are twice as large."""
    rl = replace(run.rl, rollouts=2 * run.rl.rollouts)
    return replace(run, rl=rl, roc=RocConfig(), bus=BusConfig(2 * run.bus.queue_messages))


def world_of(seed: int) -> World:
    run, faults = plan(seed)
    return World(run, seed, failure_rate=0.03, faults=faults)


def play(world: World) -> World:
    """Run the world to its end and check all invariants."""
    check(world.play())
    return world

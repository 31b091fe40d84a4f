"""Runs with three tasks: mathematics, a replayable environment, and a dialogue that is not replayable."""

import re
from collections import Counter
from functools import cache

import pytest
from msgspec.structs import replace

from asterism.bus.addresses import HEAD, ROLLOUT
from asterism.bus.codec import decode
from asterism.bus.messages import EnvironmentRestored, StartGroup, TrajectoryFailed, TrajectoryFinished, bytes_to_ids
from asterism.configs.schema.dialogue import DialogueConfig
from asterism.configs.schema.machines import BusConfig
from asterism.configs.schema.tasks import RewardConfig, TaskConfig
from asterism.policies.rollout.rollout import Rollout
from asterism.policies.tools.task_description import TaskDescription
from asterism.policies.tools.tool_schema import ToolSchema
from tests.fakes import TOKENIZER
from tests.simulation import campaign
from tests.simulation.invariants import launches, select
from tests.simulation.seeds import select_seeds
from tests.simulation.world import World

pytestmark = pytest.mark.slow

TOUCH = ToolSchema("touch", "Touch it.", {"type": "object", "properties": {}})
DESCRIPTIONS = {
    "environment": TaskDescription("environment", (TOUCH,), is_replayable=True),
    "dialogue": TaskDescription("dialogue"),
}
SEEDS = select_seeds(120, fast=(0,), per_change=12)


def world_of(seed: int) -> World:
    run, faults = campaign.plan(seed)
    dialogue = DialogueConfig(tools=(), prompt_tokens=16, response_tokens=400, max_calls_per_turn=2, max_turns=4)
    tasks = (
        TaskConfig(name="math", data="", dialogue=replace(dialogue, tools=("jupyter_code",)), reward=RewardConfig()),
        *(TaskConfig(name=name, data="", dialogue=dialogue, reward=RewardConfig()) for name in DESCRIPTIONS),
    )
    run = replace(run, tasks=tasks, rl=replace(run.rl, prompts=3), bus=BusConfig())
    return World(run, seed, failure_rate=0.03, faults=faults, descriptions=DESCRIPTIONS)


@cache
def live(seed: int) -> World:
    return campaign.play(world_of(seed))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_moved_instance_continues_its_numbers(seed: int) -> None:
    """All invariants of a run hold, and the numbers in the texts of each trajectory are consecutive.

    A retried call runs after the next call of its turn, so the numbers are sorted first.
    """
    world = live(seed)
    finished = select(world.logs[HEAD].events, TrajectoryFinished)
    assert finished
    for trajectory in finished:
        text = TOKENIZER.decode(bytes_to_ids(trajectory.record.token_ids))
        seen = sorted(int(number) for number in re.findall(r"seen (\d+)", text))
        assert seen == list(range(1, len(seen) + 1))
        assert trajectory.environment.rewards.get("seen", 0.0) <= 0.5 * (len(trajectory.environment.calls))


@pytest.mark.parametrize("seed", SEEDS)
def test_the_trajectories_of_all_tasks_add_up_to_those_of_a_step(seed: int) -> None:
    world = live(seed)
    for step in (line.values for line in world.metrics if line.kind == "step"):
        counted = sum(value for key, value in step.items() if re.fullmatch(r"task \w+: trajectories", key))
        assert counted == step["trajectories"]


def test_the_seeds_cover_the_tested_faults() -> None:
    """Some instances are restored, and some trajectories of dialogues fail because their instance is lost."""
    causes: Counter[str] = Counter()
    restored = 0
    for seed in range(12):
        world = live(seed)
        causes += Counter(each.cause for each in select(world.logs[HEAD].events, TrajectoryFailed))
        for events in launches(world, ROLLOUT):
            rollout = world.deciders()[ROLLOUT][ROLLOUT]
            assert isinstance(rollout, Rollout)
            for event in events:
                effects = rollout.decide(event.time, decode(event.frame).message)
                restored += sum(isinstance(effect.message, EnvironmentRestored) for effect in effects)
    assert restored > 10
    assert causes["environment: the process that had the instance died"] > 0
    tasks = {each.task for each in select(live(0).logs[ROLLOUT].events, StartGroup)}
    assert tasks == {"math", "environment", "dialogue"}

"""Draws the faults of a run from a seed: target, action, moment and host."""

import random
from typing import Literal, NamedTuple

from asterism.bus.addresses import name_learner_rank

Action = Literal["kill", "stop", "partition", "switch off"]

NUM_ENGINES, NUM_EXECUTORS = 2, 2
DECIDING_AND_LEARNING = ("head", "rollout-0", "learner")
TARGETS = (
    *DECIDING_AND_LEARNING,
    *(f"generator-{index}" for index in range(NUM_ENGINES)),
    *(f"executor-{index}" for index in range(NUM_EXECUTORS)),
)
NUM_RANKS = 2  # in runs with several learner ranks, in which "learner" is torchrun's agent
RANK_TARGETS = tuple(name_learner_rank(rank, NUM_RANKS) for rank in range(NUM_RANKS))
# The launcher with its processes. On host 0, this is the run, which is resumed; elsewhere a node, which joins again.
LAUNCHER = "launcher"
HOST = "host"  # all processes of a host

# In runs over hosts, each host has one generator and one executor.
HOST_0_TARGETS = (*DECIDING_AND_LEARNING, "weights", "generator-0", "executor-0")
OTHER_HOST_TARGETS = ("generator-0", "executor-0")
HEARTBEAT_TIMEOUT_S = 6.0
MAX_PAUSE_S = 3 * HEARTBEAT_TIMEOUT_S


class Fault(NamedTuple):
    target: str
    action: Action
    after_events: int  # new events in the head's log after the previous fault; -1: `after_s` counts
    after_s: float  # seconds since the previous fault, or since the start of the processes
    host: int = 0
    lasts_s: float = 0.0  # duration; 0: the fault ends when the supervisor handles it

    @property
    def ends_the_run(self) -> bool:
        return self.action == "kill" and self.host == 0 and self.target in (LAUNCHER, HOST)

    def __str__(self) -> str:
        target = f"host {self.host}" if self.target == HOST else self.target
        if self.target != HOST and self.host:
            target = f"{self.target} of host {self.host}"
        when = f"after {self.after_s:.2f} s" if self.after_events < 0 else f"after {self.after_events} events"
        duration = f" for {self.lasts_s:.1f} s" if self.lasts_s else ""
        return f"{self.action} {target} {when}{duration}"


def plan_resumption(seed: int, num_events: int) -> list[Fault]:
    """Plan one kill of the whole run."""
    draw = random.Random(seed)
    if draw.random() < 0.2:
        return [Fault(LAUNCHER, "kill", -1, draw.uniform(0.0, 5.0))]
    return [Fault(LAUNCHER, "kill", draw.randrange(num_events), 0.0)]


def plan(seed: int, num_events: int) -> list[Fault]:
    """Plan 1 to 4 faults. `num_events` is the number of head events of a run without faults."""
    draw = random.Random(seed)
    faults: list[Fault] = []
    for _ in range(draw.randint(1, 4)):
        target = draw.choice((*TARGETS, LAUNCHER))
        action: Action = "stop" if target != LAUNCHER and draw.random() < 0.2 else "kill"
        faults.append(Fault(target, action, *_draw_moment(draw, num_events)))
    return faults


def plan_ranks(seed: int, num_events: int) -> list[Fault]:
    """Plan 1 to 4 faults of a run with NUM_RANKS learner ranks. Two thirds hit a rank; half of these stop the rank."""
    draw = random.Random(f"ranks of {seed}")
    faults: list[Fault] = []
    for _ in range(draw.randint(1, 4)):
        action: Action = "stop" if draw.random() < 0.5 else "kill"
        if draw.random() < 2 / 3:
            target = draw.choice(RANK_TARGETS)
        else:
            target = draw.choice((*TARGETS, LAUNCHER))
            action = "kill" if target == LAUNCHER else action
        faults.append(Fault(target, action, *_draw_moment(draw, num_events)))
    return faults


def draw_num_hosts(seed: int) -> int:
    return 3 if random.Random(f"hosts of {seed}").random() < 0.25 else 2


def plan_over_hosts(seed: int, num_events: int, hosts: int) -> list[Fault]:
    """Plan 2 to 5 faults: half are partitions, a quarter hit a whole host or a launcher."""
    draw = random.Random(seed)
    faults: list[Fault] = []
    for _ in range(draw.randint(2, 5)):
        host, kind = draw.randrange(hosts), draw.random()
        moment = _draw_moment(draw, num_events)
        if kind < 0.5:
            faults.append(Fault(HOST, "partition", *moment, host, _draw_pause_s(draw)))
        elif kind < 0.65:
            faults.append(Fault(HOST, "switch off" if host and draw.random() < 0.5 else "kill", *moment, host))
        elif kind < 0.75:
            stops = draw.random() < 0.5
            faults.append(
                Fault(LAUNCHER, "stop" if stops else "kill", *moment, host, _draw_pause_s(draw) if stops else 0.0)
            )
        else:
            target = draw.choice(OTHER_HOST_TARGETS if host else HOST_0_TARGETS)
            faults.append(Fault(target, "stop" if draw.random() < 0.2 else "kill", *moment, host))
    return faults


def _draw_moment(draw: random.Random, num_events: int) -> tuple[int, float]:
    """Draw the moment of a fault: `after_events` and `after_s` of Fault."""
    return (-1, draw.uniform(0.0, 5.0)) if draw.random() < 0.3 else (draw.randrange(num_events // 2), 0.0)


def _draw_pause_s(draw: random.Random) -> float:
    """Draw the seconds of a pause. Half of the pauses are shorter than the heartbeat timeout."""
    bounds = (0.2, HEARTBEAT_TIMEOUT_S) if draw.random() < 0.5 else (HEARTBEAT_TIMEOUT_S, MAX_PAUSE_S)
    return draw.uniform(*bounds)

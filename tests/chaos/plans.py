"""What happens to a run, drawn from a seed: who is hit, how, when, and on which host."""

from __future__ import annotations

import random
from typing import Literal, NamedTuple

Action = Literal["kill", "stop", "partition", "switch off"]

NUM_ENGINES, NUM_EXECUTORS = 2, 2
DECIDING_AND_LEARNING = ("head", "rollout-0", "learner", "learner rank")
TARGETS = (
    *DECIDING_AND_LEARNING,
    *(f"generator-{index}" for index in range(NUM_ENGINES)),
    *(f"executor-{index}" for index in range(NUM_EXECUTORS)),
)
LAUNCHER = "launcher"  # with it all die that it started: on host 0 the run, which is resumed; elsewhere a node, which joins anew
HOST = "host"  # all that runs there, at once

# Over hosts each has one generator and one executor.
OF_HOST_0 = (*DECIDING_AND_LEARNING, "weights", "generator-0", "executor-0")
OF_OTHERS = ("generator-0", "executor-0")
SILENT_S = 6.0
MAX_PAUSE_S = 3 * SILENT_S


class Fault(NamedTuple):
    target: str
    action: Action
    after_events: int  # in the head's log, since the fault before; -1: by the clock
    after_s: float  # since the fault before, or since the processes were started
    host: int = 0
    lasts_s: float = 0.0  # 0: whoever supervises the target has to find it

    @property
    def ends_the_run(self) -> bool:
        return self.action == "kill" and self.host == 0 and self.target in (LAUNCHER, HOST)

    def __str__(self) -> str:
        who = f"host {self.host}" if self.target == HOST else self.target
        if self.target != HOST and self.host:
            who = f"{self.target} of host {self.host}"
        when = f"after {self.after_s:.2f} s" if self.after_events < 0 else f"after {self.after_events} events"
        lasting = f" for {self.lasts_s:.1f} s" if self.lasts_s else ""
        return f"{self.action} {who} {when}{lasting}"


def resumption(seed: int, num_events: int) -> list[Fault]:
    """All of the run is killed, once."""
    draw = random.Random(seed)
    if draw.random() < 0.2:
        return [Fault(LAUNCHER, "kill", -1, draw.uniform(0.0, 5.0))]
    return [Fault(LAUNCHER, "kill", draw.randrange(num_events), 0.0)]


def plan(seed: int, num_events: int) -> list[Fault]:
    """One to four faults, within about as many events of the head as a run has that nobody disturbs."""
    draw = random.Random(seed)
    faults: list[Fault] = []
    for _ in range(draw.randint(1, 4)):
        target = draw.choice((*TARGETS, LAUNCHER))
        action: Action = "stop" if target != LAUNCHER and draw.random() < 0.2 else "kill"
        faults.append(Fault(target, action, *_moment(draw, num_events)))
    return faults


def num_hosts(seed: int) -> int:
    return 3 if random.Random(f"hosts of {seed}").random() < 0.25 else 2


def plan_over_hosts(seed: int, num_events: int, hosts: int) -> list[Fault]:
    """Two to five faults; every other one is a partition, a fourth hit all that runs on a host."""
    draw = random.Random(seed)
    faults: list[Fault] = []
    for _ in range(draw.randint(2, 5)):
        host, kind = draw.randrange(hosts), draw.random()
        moment = _moment(draw, num_events)
        if kind < 0.5:
            faults.append(Fault(HOST, "partition", *moment, host, _pause_s(draw)))
        elif kind < 0.65:
            faults.append(Fault(HOST, "switch off" if host and draw.random() < 0.5 else "kill", *moment, host))
        elif kind < 0.75:
            stops = draw.random() < 0.5
            faults.append(Fault(LAUNCHER, "stop" if stops else "kill", *moment, host, _pause_s(draw) if stops else 0.0))
        else:
            target = draw.choice(OF_OTHERS if host else OF_HOST_0)
            faults.append(Fault(target, "stop" if draw.random() < 0.2 else "kill", *moment, host))
    return faults


def _moment(draw: random.Random, num_events: int) -> tuple[int, float]:
    """When, in events and in seconds."""
    return (-1, draw.uniform(0.0, 5.0)) if draw.random() < 0.3 else (draw.randrange(num_events // 2), 0.0)


def _pause_s(draw: random.Random) -> float:
    """Shorter than silence in half of the cases."""
    return draw.uniform(0.2, SILENT_S) if draw.random() < 0.5 else draw.uniform(SILENT_S, MAX_PAUSE_S)

"""What happens to a run, drawn from a seed: who is hit, how, and when."""

from __future__ import annotations

import random
from typing import Literal, NamedTuple

Action = Literal["kill", "stop"]

NUM_ENGINES, NUM_EXECUTORS = 2, 2
TARGETS = (
    *("head", "rollout-0", "learner", "learner rank"),
    *(f"generator-{index}" for index in range(NUM_ENGINES)),
    *(f"executor-{index}" for index in range(NUM_EXECUTORS)),
)
EVERYTHING = "launcher"  # with it all others die; the run is resumed


class Fault(NamedTuple):
    target: str
    action: Action
    after_events: int  # in the head's log, since the fault before; -1: by the clock
    after_s: float  # since the fault before, or since the processes were started

    def __str__(self) -> str:
        when = f"after {self.after_s:.2f} s" if self.after_events < 0 else f"after {self.after_events} events"
        return f"{self.action} {self.target} {when}"


def resumption(seed: int, num_events: int) -> list[Fault]:
    """All of the run is killed, once."""
    draw = random.Random(seed)
    if draw.random() < 0.2:
        return [Fault(EVERYTHING, "kill", -1, draw.uniform(0.0, 5.0))]
    return [Fault(EVERYTHING, "kill", draw.randrange(num_events), 0.0)]


def plan(seed: int, num_events: int) -> list[Fault]:
    """One to four faults, within about as many events of the head as a run has that nobody disturbs."""
    draw = random.Random(seed)
    faults: list[Fault] = []
    for _ in range(draw.randint(1, 4)):
        target = draw.choice((*TARGETS, EVERYTHING))
        action: Action = "stop" if target != EVERYTHING and draw.random() < 0.2 else "kill"
        if draw.random() < 0.3:
            faults.append(Fault(target, action, -1, draw.uniform(0.0, 5.0)))
        else:
            faults.append(Fault(target, action, draw.randrange(num_events // 2), 0.0))
    return faults

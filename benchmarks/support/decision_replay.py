"""Measures an arbiter's decision speed: fresh arbiters replay recorded decisions.

Each replay must produce the recorded effects. A decision's time is the fastest of `REPLAYS`: host
interruptions rarely hit the same decision twice. The garbage collector is off, as in a simulation.
"""

import gc
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from statistics import median
from typing import NamedTuple

import msgspec

from asterism.bus.messages import AnyMessage, EngineJoined, LeaseReleased, LeaseRequested
from asterism.policies.decider import Decider, Send

REPLAYS = 3
_BATCH = 4096  # decisions per timed block; their effects are compared after the block, outside the measured time


class RecordedDecision(NamedTuple):
    now: float
    event: AnyMessage
    effects: Sequence[Send]


class DecisionSpeed(msgspec.Struct, frozen=True):
    decisions: int
    live_trajectories: int  # highest number at the same time
    engines: int
    decided_s: float  # CPU time of all decisions in the median replay; includes the reads of the clock
    worst_s: float  # wall time of the slowest decision


class DecisionRecorder:
    """A record of an arbiter's decisions, in order."""

    def __init__(self) -> None:
        self._decided: list[RecordedDecision] = []

    def on_decision(self, now: float, event: AnyMessage, effects: Sequence[Send]) -> None:
        self._decided.append(RecordedDecision(now, event, effects))

    def measure_speed(self, fresh: Callable[[], Decider]) -> DecisionSpeed:
        """Replay the decisions. Raises AssertionError if the effects of a fresh arbiter differ."""
        events = [decided.event for decided in self._decided]
        replays = [self._replay(fresh()) for _ in range(REPLAYS)]
        return DecisionSpeed(
            decisions=len(events),
            live_trajectories=max(accumulate(map(_count_live_change, events))),
            engines=len({event.engine for event in events if isinstance(event, EngineJoined)}),
            decided_s=median(cpu_s for cpu_s, _ in replays),
            worst_s=max(map(min, *(each_s for _, each_s in replays))),
        )

    def _replay(self, arbiter: Decider) -> tuple[float, list[float]]:
        """Return the CPU seconds of all decisions together and the wall seconds of each decision."""
        cpu_s, each_s = 0.0, list[float]()
        collects = gc.isenabled()
        gc.disable()
        try:
            for first in range(0, len(self._decided), _BATCH):
                before = self._decided[first : first + _BATCH]
                began_s = time.thread_time()
                again = [_time_decision(arbiter, decided, each_s) for decided in before]
                cpu_s += time.thread_time() - began_s
                for number, (decided, effects) in enumerate(zip(before, again, strict=True), first):
                    assert decided.effects == effects, f"decision {number}, {decided.event}: {effects}"
        finally:
            if collects:
                gc.enable()
        return cpu_s, each_s


def _time_decision(arbiter: Decider, decided: RecordedDecision, each_s: list[float]) -> Sequence[Send]:
    began_s = time.perf_counter()
    effects = arbiter.decide(decided.now, decided.event)
    each_s.append(time.perf_counter() - began_s)
    return effects


def _count_live_change(event: AnyMessage) -> int:
    """Return the change in the number of live trajectories."""
    return (isinstance(event, LeaseRequested) and event.lease == 1) - isinstance(event, LeaseReleased)

"""How fast an arbiter decides: what it has decided is decided again by fresh arbiters, which must come to the same.

What a decision costs by itself it costs each time; what interrupts the host hits another one the next time. So a
decision's time is the fastest of `REPLAYS`. The garbage collector is off, as in a simulation.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from statistics import median
from typing import NamedTuple

import msgspec

from bus.messages import AnyMessage, EngineJoined, LeaseReleased, LeaseRequested
from policies.decider import Decider, Send

REPLAYS = 3
_TOGETHER = 4096  # decisions that are timed before what they have come to is compared


class Decided(NamedTuple):
    now: float
    event: AnyMessage
    effects: Sequence[Send]


class Speed(msgspec.Struct, frozen=True):
    decisions: int
    live_trajectories: int  # at once, at most
    engines: int
    decided_s: float  # CPU time of all decisions, the measuring included: the median replay
    worst_s: float  # wall time


class Decisions:
    """Those of one arbiter, in their order."""

    def __init__(self) -> None:
        self._decided: list[Decided] = []

    def saw(self, now: float, event: AnyMessage, effects: Sequence[Send]) -> None:
        self._decided.append(Decided(now, event, effects))

    def speed(self, fresh: Callable[[], Decider]) -> Speed:
        """Raises AssertionError where a fresh arbiter decides otherwise."""
        events = [decided.event for decided in self._decided]
        replays = [self._replay(fresh()) for _ in range(REPLAYS)]
        return Speed(
            decisions=len(events),
            live_trajectories=max(accumulate(map(_begun_or_ended, events))),
            engines=len({event.engine for event in events if isinstance(event, EngineJoined)}),
            decided_s=median(cpu_s for cpu_s, _ in replays),
            worst_s=max(map(min, *(each_s for _, each_s in replays))),
        )

    def _replay(self, arbiter: Decider) -> tuple[float, list[float]]:
        """CPU seconds of all, and wall seconds of each."""
        cpu_s, each_s = 0.0, list[float]()
        collects = gc.isenabled()
        gc.disable()
        try:
            for first in range(0, len(self._decided), _TOGETHER):
                before = self._decided[first : first + _TOGETHER]
                began_s = time.thread_time()
                again = [_timed(arbiter, decided, each_s) for decided in before]
                cpu_s += time.thread_time() - began_s
                for number, (decided, effects) in enumerate(zip(before, again, strict=True), first):
                    assert decided.effects == effects, f"decision {number}, {decided.event}: {effects}"
        finally:
            if collects:
                gc.enable()
        return cpu_s, each_s


def _timed(arbiter: Decider, decided: Decided, each_s: list[float]) -> Sequence[Send]:
    began_s = time.perf_counter()
    effects = arbiter.decide(decided.now, decided.event)
    each_s.append(time.perf_counter() - began_s)
    return effects


def _begun_or_ended(event: AnyMessage) -> int:
    """How many trajectories more there are with it."""
    return (isinstance(event, LeaseRequested) and event.lease == 1) - isinstance(event, LeaseReleased)

"""Which of the long calls run: few at a time, so that those that have just begun find a processor. Standard library only.

A call that has run for long may be an endless loop, and a hundred of them would take a processor from a thousand that
need three milliseconds each. So the long ones take turns. First comes who has had the fewest, and among those who holds
the most memory, because its end gives that back. One that waits for something else than a processor stands in nobody's
way: it runs. No clock and no signal here.
"""

from typing import Generic, TypeVar

TURN_CPU_S = 0.5
Call = TypeVar("Call")


class _Long:
    __slots__ = ("busy", "cpu_s", "held", "in_turn", "order", "stopped", "turns")

    def __init__(self, order: int) -> None:
        self.order = order
        self.cpu_s = 0.0  # processor time in this turn
        self.held = 0  # bytes
        self.turns = 0  # that it has had
        self.busy = True
        self.in_turn = False
        self.stopped = False

    @property
    def rank(self) -> tuple[bool, int, int, int]:
        return not self.in_turn, self.turns, -self.held, self.order


class Turns(Generic[Call]):
    """`num_running` busy calls run. Each step returns what is to be done: (to stop, to let go on)."""

    def __init__(self, num_running: int) -> None:
        self._num_running = num_running
        self._long: dict[Call, _Long] = {}
        self._joined = 0

    def __contains__(self, call: Call) -> bool:
        return call in self._long

    def note(self, call: Call, cpu_s: float, held: int, busy: bool) -> tuple[list[Call], list[Call]]:
        """Since it was noted last, the call has used `cpu_s`; it holds `held` bytes. The first note makes it a long call."""
        long = self._long.get(call)
        if long is None:
            self._joined += 1
            long = self._long[call] = _Long(self._joined)
        long.cpu_s += cpu_s
        long.held = held
        long.busy = busy or long.stopped
        long.in_turn = long.in_turn and long.busy
        return self._step()

    def leave(self, call: Call) -> tuple[list[Call], list[Call]]:
        long = self._long.pop(call, None)
        return ([], []) if long is None else self._step()

    def had_one(self, call: Call) -> bool:
        """Whether the call has had a whole turn."""
        return call in self._long and self._long[call].turns > 0

    def _step(self) -> tuple[list[Call], list[Call]]:
        busy = [(call, long) for call, long in self._long.items() if long.busy]
        for _, long in busy:
            if long.cpu_s >= TURN_CPU_S:
                long.cpu_s = 0.0
                long.turns += 1
                long.in_turn = False
        busy.sort(key=lambda one: one[1].rank)
        to_stop: list[Call] = []
        to_go: list[Call] = []
        for place, (call, long) in enumerate(busy):
            long.in_turn = place < self._num_running
            if long.in_turn == long.stopped:
                (to_go if long.stopped else to_stop).append(call)
                long.stopped = not long.stopped
        return to_stop, to_go

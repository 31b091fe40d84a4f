"""Which executor works for a trajectory: the one with the fewest open calls for its slots when the first call is made.

It stays there, because its notebook does, until that executor leaves. A call that an executor could not run counts there
as if it were still open until one succeeds: who fails everything at once is not the one with the most room.

An address is that of one life of an executor: one that has left never joins again.
"""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from bus.messages import ExecutorJoined, ProtocolError

_REMEMBERED = 65_536  # lives that are over


class Load(msgspec.Struct, frozen=True):
    slots: int
    open_calls: int = 0  # sent there and not yet answered, gradings among them
    failures: int = 0  # of infrastructure, since the last result


class Placement:
    """The executors that are there, by address."""

    def __init__(self) -> None:
        self.loads: dict[str, Load] = {}
        self._left: dict[str, None] = {}  # in their order

    def join(self, event: ExecutorJoined) -> None:
        if event.executor in self.loads:
            raise ProtocolError(f"{event.executor} joined twice")
        if event.executor in self._left:
            raise ProtocolError(f"{event.executor} has left")
        if event.slots <= 0:
            raise ProtocolError(f"{event.executor} offers {event.slots} slots")
        self.loads[event.executor] = Load(event.slots)

    def leave(self, executor: str) -> None:
        if executor not in self.loads:
            raise ProtocolError(f"{executor} never joined")
        del self.loads[executor]
        self._left[executor] = None
        if len(self._left) > _REMEMBERED:
            del self._left[next(iter(self._left))]

    def least_busy(self) -> str | None:
        """Ties go to the first name."""
        shares = [((load.open_calls + load.failures) / load.slots, name) for name, load in self.loads.items()]
        return min(shares)[1] if shares else None

    def book(self, executor: str, calls: int) -> None:
        """So many calls more are open there, or fewer."""
        if calls:
            load = self.loads[executor]
            self.loads[executor] = replace(load, open_calls=load.open_calls + calls)

    def answered(self, executor: str, *, failed: bool) -> None:
        load = self.loads[executor]
        if failed or load.failures:
            self.loads[executor] = replace(load, failures=load.failures + 1 if failed else 0)

"""Places a trajectory, at its first call, on the executor with the fewest open calls per slot.

A trajectory keeps its executor, which holds its notebook, until the executor leaves. Infrastructure
failures count as open calls until a call succeeds. Otherwise an executor that fails every call
immediately would receive most calls. An address belongs to one incarnation of an executor: an
executor that has left never joins again.
"""

import msgspec
from msgspec.structs import replace

from asterism.bus.messages import ExecutorJoined, ProtocolError

_MAX_DEPARTED = 65_536  # addresses of departed executors that are kept


class ExecutorOccupancy(msgspec.Struct, frozen=True):
    slots: int
    open_calls: int = 0  # unanswered calls, including gradings
    failures: int = 0  # infrastructure failures since the last result


class ExecutorPlacement:
    """The occupancy of the joined executors by address."""

    def __init__(self) -> None:
        self.loads: dict[str, ExecutorOccupancy] = {}
        self._departed: dict[str, None] = {}  # addresses of departed executors, oldest first

    def add_executor(self, event: ExecutorJoined) -> None:
        if event.executor in self.loads:
            raise ProtocolError(f"{event.executor} joined twice")
        if event.executor in self._departed:
            raise ProtocolError(f"{event.executor} has left")
        if event.slots <= 0:
            raise ProtocolError(f"{event.executor} offers {event.slots} slots")
        self.loads[event.executor] = ExecutorOccupancy(event.slots)

    def remove_executor(self, executor: str) -> None:
        if executor not in self.loads:
            raise ProtocolError(f"{executor} never joined")
        del self.loads[executor]
        self._departed[executor] = None
        if len(self._departed) > _MAX_DEPARTED:
            del self._departed[next(iter(self._departed))]

    def find_least_busy(self) -> str | None:
        """Return the least busy executor, on a tie the first by name, or None without executors."""
        shares = [((load.open_calls + load.failures) / load.slots, name) for name, load in self.loads.items()]
        return min(shares)[1] if shares else None

    def add_open_calls(self, executor: str, calls: int) -> None:
        """Add `calls`, which is negative for answered calls, to the executor's open calls."""
        if calls:
            load = self.loads[executor]
            self.loads[executor] = replace(load, open_calls=load.open_calls + calls)

    def on_answered(self, executor: str, *, failed: bool) -> None:
        load = self.loads[executor]
        if failed or load.failures:
            self.loads[executor] = replace(load, failures=load.failures + 1 if failed else 0)

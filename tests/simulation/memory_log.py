"""An in-memory event log under the virtual clock.

Records are committed after a random delay. A kill loses all uncommitted records.
"""

import asyncio
from collections.abc import Callable, Iterator
from random import Random

from asterism.bus.event_log.records import Decision, Event

_COMMITS_PER_S = 100.0


class CommittedLog:
    """The committed records of all incarnations of a process."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.decisions: dict[int, Decision] = {}

    def find_epoch_start(self, epoch: int) -> int | None:
        """Find the start of an epoch, as asterism.bus.event_log.reader.find_epoch_start does."""
        numbers = (event.seq for event in self.events if event.kind == "RunStarted" and event.epoch == epoch)
        return next(numbers, None)

    def since(self, seq: int) -> Iterator[tuple[Event, Decision | None]]:
        for event in self.events[seq - 1 :]:
            yield event, self.decisions.get(event.seq)


class MemoryLog:
    """The log of one incarnation.

    It implements the methods of asterism.bus.event_log.writer.EventLog that asterism.actors.runtime.decider_loop
    uses.
    """

    is_full = False

    def __init__(self, kept: CommittedLog, random: Random, appended: Callable[[], object] = lambda: None) -> None:
        self._kept, self._random, self._appended = kept, random, appended
        self._loop = asyncio.get_running_loop()
        self._pending: list[Event | Decision] = []
        self._last = len(kept.events)
        self._dead = False
        self._notified = 0
        self.on_commit: Callable[[int], object] = lambda seq: None

    def kill(self) -> None:
        self._dead = True

    def raise_if_failed(self) -> None:
        pass

    def append(
        self,
        time: float,
        actor: str,
        sender: str,
        kind: str,
        trajectories: int | None,
        frame: bytes,
        epoch: int = 0,
        number: int = 0,
    ) -> int:
        self._last += 1
        self._put(Event(self._last, time, actor, sender, epoch, number, kind, trajectories, frame))
        self._appended()
        return self._last

    def append_decision(self, seq: int, effects: bytes, state: bytes | None) -> None:
        self._put(Decision(seq, effects, state))

    def _put(self, record: Event | Decision) -> None:
        self._pending.append(record)
        if len(self._pending) == 1:
            self._loop.call_later(self._random.expovariate(_COMMITS_PER_S), self._commit)

    def _commit(self) -> None:
        """Commit all pending records, but sometimes not the last decision. Schedule `on_commit`."""
        if self._dead:
            return
        records, self._pending = self._pending, []
        if isinstance(records[-1], Decision) and len(records) > 1 and self._random.random() < 0.2:
            self._put(records.pop())
        for record in records:
            if isinstance(record, Event):
                assert record.seq == len(self._kept.events) + 1
                self._kept.events.append(record)
            else:
                assert record.seq not in self._kept.decisions
                self._kept.decisions[record.seq] = record
        self._loop.call_later(self._random.expovariate(10 * _COMMITS_PER_S), self._notify, len(self._kept.events))

    def _notify(self, seq: int) -> None:
        if not self._dead and seq > self._notified:  # `on_commit` is called once for each commit
            self._notified = seq
            self.on_commit(seq)

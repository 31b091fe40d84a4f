"""The event log's interface, in memory and under the virtual clock: what is appended is committed a moment later, and a
kill takes along what is not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from random import Random

from bus.event_log import Decision, Event

_COMMITS_PER_S = 100.0


class Kept:
    """What survives: all that was committed, over all lives of a process."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.decisions: dict[int, Decision] = {}

    def first_of_session(self, session: int) -> int | None:
        """As bus.event_reading.first_of_session."""
        numbers = (event.seq for event in self.events if event.kind == "RunStarted" and event.session == session)
        return next(numbers, None)

    def since(self, seq: int) -> Iterator[tuple[Event, Decision | None]]:
        for event in self.events[seq - 1 :]:
            yield event, self.decisions.get(event.seq)


class MemoryLog:
    """Of one life. Implements what actors.decider_loop asks of bus.event_log.EventLog."""

    full = False

    def __init__(self, kept: Kept, random: Random, appended: Callable[[], object] = lambda: None) -> None:
        self._kept, self._random, self._appended = kept, random, appended
        self._loop = asyncio.get_running_loop()
        self._pending: list[Event | Decision] = []
        self._last = len(kept.events)
        self._dead = False
        self._told = 0
        self.on_commit: Callable[[int], object] = lambda seq: None

    def kill(self) -> None:
        self._dead = True

    def check(self) -> None:
        pass

    def append(
        self,
        at: float,
        actor: str,
        sender: str,
        kind: str,
        trajectory: int | None,
        frame: bytes,
        session: int = 0,
        number: int = 0,
    ) -> int:
        self._last += 1
        self._put(Event(self._last, at, actor, sender, session, number, kind, trajectory, frame))
        self._appended()
        return self._last

    def decided(self, seq: int, effects: bytes, state: bytes | None) -> None:
        self._put(Decision(seq, effects, state))

    def _put(self, record: Event | Decision) -> None:
        self._pending.append(record)
        if len(self._pending) == 1:
            self._loop.call_later(self._random.expovariate(_COMMITS_PER_S), self._commit)

    def _commit(self) -> None:
        """All that is there, or all but the last decision. It is told a moment later."""
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
        self._loop.call_later(self._random.expovariate(10 * _COMMITS_PER_S), self._tell, len(self._kept.events))

    def _tell(self, seq: int) -> None:
        if not self._dead and seq > self._told:  # one commit after the other
            self._told = seq
            self.on_commit(seq)

"""The next life of a process that decides: it decides again on all that its log has of this session, and goes on.

Since nothing left the process before its cause was in the log (actors/decider_loop.py), peers see a pause and nothing
else: what they had been sent has the same numbers again, and what was not acknowledged to them they still hold.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path

import msgspec

from actors.decider_loop import ACTS, Observer
from actors.replay import decide_again
from bus.codec import MalformedFrame, decode
from bus.event_log import Decision, Event
from bus.event_reading import check_whole, first_of_session, read_events
from bus.lanes import Lane, lane_of, lane_of_frame
from bus.messages import AnyMessage
from bus.transport import process_of
from configs.errors import UnusableInput
from policies.decider import Decider, Send

Peer = tuple[str, Lane]


class NotRecoverable(UnusableInput):
    """The log and the code that reads it do not agree: `--resume` begins anew after the last checkpoint."""


class Sent(msgspec.Struct):
    """What went to one peer in one lane: the last frames, as many as it may not have acknowledged, and after these what
    may never have been sent, since acts (actors/decider_loop.py) wait for the log and for room at any peer."""

    frames: deque[bytes]
    unsure: deque[tuple[int, bytes]] = msgspec.field(default_factory=deque)  # after which event, what
    next_number: int = 0

    def add(self, frame: bytes, num_events: int) -> None:
        self.unsure.append((num_events, frame))
        self.next_number += 1
        while self.unsure[0][0] < num_events - ACTS - 1:
            self.frames.append(self.unsure.popleft()[1])

    def first(self) -> bytes | None:
        """Taken out."""
        if self.frames:
            return self.frames.popleft()
        return self.unsure.popleft()[1] if self.unsure else None

    def all(self) -> tuple[bytes, ...]:
        return (*self.frames, *(frame for _, frame in self.unsure))


class Recovery:
    """What a log says of one process in one session, its deciders brought to where it ends."""

    def __init__(
        self,
        process: str,
        session: int,
        deciders: Mapping[str, Decider],
        services: Collection[str],
        window: int,
        observer: Observer | None = None,
    ) -> None:
        """`window` bounds the frames that a peer may not have acknowledged. `observer` sees what the last life saw."""
        self._observer = observer
        self._process = process
        self._session = session
        self._deciders = deciders
        self._services = services
        self.num_events = 0
        self.at = 0.0  # time of the last event
        self.seconds = 0.0  # that it took
        self._window = window
        self.sent: dict[Peer, Sent] = {}
        self.taken: dict[Peer, tuple[int, int]] = {}  # session, and the number that comes next
        self.served: list[tuple[str, AnyMessage]] = []  # to which service of the process, what
        self.undecided: list[Decision] = []  # on events that the last life logged and did not live to decide on

    def read(self, logged: Iterable[tuple[Event, Decision | None]], begin: Sequence[bytes]) -> None:
        """Decide on all that was logged in this session. `begin` are the frames with which the process began.

        Raises NotRecoverable.
        """
        began = time.monotonic()
        for frame in begin:
            self._sent(self._process, lane_of_frame(frame)).add(frame, 0)
        for event, decision in logged:
            self._take(event)
            if self._observer is not None:
                self._observer.quiet = decision is not None
            decided = self._decide(event)
            if decision is None:
                self.undecided.append(decided)
            elif decision != decided:
                raise NotRecoverable(
                    f"event {event.seq} of {self._process} ({event.actor}, {event.kind}) is decided in another way than it was: "
                    "--resume begins anew after the last checkpoint"
                )
            self.num_events += 1
            self.at = event.time
        if self._observer is not None:
            self._observer.quiet = False
        self.seconds = time.monotonic() - began

    def _sent(self, process: str, lane: Lane) -> Sent:
        if (process, lane) not in self.sent:
            bound = None if process == self._process else self._window
            self.sent[process, lane] = Sent(deque(maxlen=bound))
        return self.sent[process, lane]

    def _take(self, event: Event) -> None:
        sender, lane = process_of(event.sender), lane_of(event.kind)
        if sender == self._process:
            if self._sent(sender, lane).first() != event.frame:
                raise NotRecoverable(
                    f"event {event.seq} ({event.kind}) came from {sender} itself, which did not send it"
                )
            return
        known = self.taken.get((sender, lane), (-1, 0))
        self.taken[sender, lane] = max(known, (event.session, event.number + 1))

    def _decide(self, event: Event) -> Decision:
        try:
            envelope = decode(event.frame)
        except MalformedFrame as error:
            raise NotRecoverable(
                f"event {event.seq} of {self._process} ({event.actor}, {event.kind}) is damaged ({error}): "
                "--resume begins anew after the last checkpoint"
            ) from error
        done = decide_again(self._deciders[event.actor], envelope, event.time)
        if not isinstance(done.effects, str):
            if self._observer is not None:
                self._observer.saw(event.time, done.message, done.effects)
            for effect, frame in zip(done.effects, done.frames, strict=True):
                self._note(effect, frame)
        return Decision(event.seq, *done.fingerprints)

    def _note(self, effect: Send, frame: bytes) -> None:
        process, _, actor = effect.to.partition("/")
        if process == self._process and actor in self._services:
            self.served.append((actor, effect.message))
        else:
            self._sent(process, lane_of(type(effect.message).__name__)).add(frame, self.num_events)

    def links(self) -> dict[Peer, tuple[int, Sequence[bytes]]]:
        """As bus.transport.Bus.restore takes them."""
        return {peer: (sent.next_number, sent.all()) for peer, sent in self.sent.items()}


def recover(
    path: Path,
    process: str,
    session: int,
    deciders: Mapping[str, Decider],
    services: Collection[str],
    window: int,
    begin: Sequence[bytes],
    observer: Observer | None = None,
) -> Recovery | None:
    """None if the log has nothing of this session: the process begins. Raises NotRecoverable, and UnusableLog where
    log.keep_steps has removed what the deciders follow from."""
    first = first_of_session(path, session)
    if first is None:
        return None
    check_whole(path, since=first)
    recovery = Recovery(process, session, deciders, services, window, observer)
    with closing(read_events(path, since=first)) as logged:  # on this thread, even where the log is refused
        recovery.read(logged, begin)
    return recovery

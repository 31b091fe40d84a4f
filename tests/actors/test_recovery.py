"""A process that decides is killed at any of its events, and goes on from its log as if nothing had been."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from random import Random

import msgspec
import pytest

from actors.decider_loop import DeciderLoop
from actors.recovery import NotRecoverable, Recovery, recover
from bus.codec import decode, encode
from bus.event_log import EventLog
from bus.event_reading import UnusableLog, read_events
from bus.in_process import Hub
from bus.lanes import BULK, CONTROL
from bus.messages import (
    AnyMessage,
    BufferCursor,
    Envelope,
    LeaseParked,
    LeaseReleased,
    MetricsRecorded,
    ProtocolError,
    RunStarted,
    Shutdown,
    TurnFailed,
)
from bus.transport import Bus
from policies.decider import Send
from tests.simulation.clock import run_virtually
from tests.simulation.memory_log import Kept, MemoryLog

SESSION = 1 << 20
BEGIN = [encode(Envelope("head", f"head/{actor}", RunStarted(0, BufferCursor()))) for actor in ("one", "two")]


class Totals(msgspec.Struct):
    events: int = 0
    tokens: int = 0


class Counting:
    """A decider that answers in both lanes, tells the other one in its process, and has something to record."""

    def __init__(self, other: str) -> None:
        self._other = other
        self.state = Totals()

    def decide(self, now: float, event: AnyMessage) -> Sequence[Send]:
        if isinstance(event, LeaseReleased) and event.tokens == 13:
            raise ProtocolError("unlucky")
        self.state.events += 1
        match event:
            case RunStarted():
                return []
            case LeaseReleased(trajectory_id=trajectory_id, tokens=tokens):
                self.state.tokens += tokens
                return [
                    Send("peer", LeaseParked(trajectory_id, self.state.tokens)),
                    Send(f"head/{self._other}", LeaseParked(trajectory_id, tokens)),
                    Send("peer/deep", TurnFailed(trajectory_id, 0, 1, f"at {now}")),
                ]
            case _:
                return [Send("head/metrics", MetricsRecorded("step", self.state.events, "", {}))]

    def state_after(self, event: AnyMessage) -> msgspec.Struct | None:
        return self.state


def deciders() -> dict[str, Counting]:
    return {"one": Counting("two"), "two": Counting("one")}


async def record(folder: Path) -> list[bytes]:
    """Forty events and what becomes of them, in `head.sqlite`; what the peer received."""
    hub = Hub()
    head, peer = hub.join("head", 1000, SESSION), hub.join("peer", 1000, SESSION + 7)
    log = EventLog(folder / "head.sqlite")
    for frame in BEGIN:
        await head.send_frame("head", frame)
    for number in range(40):
        await peer.send(f"head/{'one' if number % 3 else 'two'}", LeaseReleased(number, number))
    await peer.send("head", Shutdown())
    clock = iter(range(1000))
    await DeciderLoop(head, log, deciders(), {"metrics": nothing}, lambda: float(next(clock))).run()
    log.close()
    return [await received(peer) for _ in range(peer.waiting)]


async def nothing(message: AnyMessage) -> None:
    pass


async def received(bus: Bus) -> bytes:
    return (await bus.receive_delivery()).frame


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[bytes]]:
    folder = tmp_path_factory.mktemp("recorded")
    return folder / "head.sqlite", asyncio.run(record(folder))


def recovered(path: Path, num_events: int) -> tuple[Recovery, dict[str, Counting]]:
    """From the first events of the log, the last one without its decision."""
    made = deciders()
    recovery = Recovery("head", SESSION, made, ("metrics",), window=1000)
    logged = list(read_events(path))[:num_events]
    recovery.read([*logged[:-1], (logged[-1][0], None)], BEGIN)
    return recovery, made


def test_whenever_it_is_killed_it_has_sent_a_beginning_of_what_it_would_have_sent(
    recorded: tuple[Path, list[bytes]],
) -> None:
    path, to_peer = recorded
    lanes = {CONTROL: [], BULK: []}
    for frame in to_peer:
        lanes[BULK if isinstance(decode(frame).message, TurnFailed) else CONTROL].append(frame)
    total = len(list(read_events(path)))
    assert total > 80
    for count in range(2, total + 1, 5):
        recovery, made = recovered(path, count)
        assert sum(each.state.events for each in made.values()) + _refused(path, count) == count
        for lane, frames in lanes.items():
            number, sent = recovery.links().get(("peer", lane), (0, ()))
            assert list(sent) == frames[:number]
        assert [decision.seq for decision in recovery.undecided] == [count]
    assert recovery.links()["peer", BULK][0] == len(lanes[BULK]) == 39


def _refused(path: Path, count: int) -> int:
    messages = [decode(event.frame).message for event, _ in list(read_events(path))[:count]]
    return sum(isinstance(message, LeaseReleased) and message.tokens == 13 for message in messages)


def test_what_it_has_received_from_a_peer_is_what_its_log_has(recorded: tuple[Path, list[bytes]]) -> None:
    path, _ = recorded
    for count in range(2, len(list(read_events(path))) + 1, 5):
        events = [event for event, _ in list(read_events(path))[:count]]
        heard = [event for event in events if event.sender == "peer"]
        recovery, _ = recovered(path, count)
        expected = {("peer", CONTROL): (SESSION + 7, len(heard))} if heard else {}
        assert recovery.taken == expected


def test_what_it_had_told_itself_and_not_yet_read_is_in_its_inbox_again(recorded: tuple[Path, list[bytes]]) -> None:
    path, _ = recorded
    logged = [event for event, _ in read_events(path)]
    to_itself = [event.frame for event in logged if event.sender.startswith("head")]
    for count in range(1, len(logged) + 1, 5):
        recovery, _ = recovered(path, count)
        read = [event.frame for event in logged[:count] if event.sender.startswith("head")]
        waiting = list(recovery.links()["head", CONTROL][1])
        assert [*read, *waiting] == to_itself[: len(read) + len(waiting)]


@pytest.mark.parametrize("acts", [10, 1000])
def test_what_waited_for_room_at_a_peer_is_not_lost(
    recorded: tuple[Path, list[bytes]], monkeypatch: pytest.MonkeyPatch, acts: int
) -> None:
    """Of the last events nothing may have left the process yet; before these, a peer may owe a window of answers."""
    monkeypatch.setattr("actors.recovery.ACTS", acts)
    path, to_peer = recorded
    bulk = [frame for frame in to_peer if isinstance(decode(frame).message, TurnFailed)]
    logged = list(read_events(path))
    recovery = Recovery("head", SESSION, deciders(), ("metrics",), window=4)
    recovery.read(logged, BEGIN)
    number, frames = recovery.links()["peer", BULK]
    assert number == len(bulk) == 39
    assert list(frames) == bulk[len(bulk) - len(frames) :]
    caused_late = sum(isinstance(decode(event.frame).message, LeaseReleased) for event, _ in logged[-acts:])
    assert len(frames) >= min(39, caused_late + 4)
    assert (len(frames) < 39) == (acts == 10)


def test_what_services_were_told_is_told_again(recorded: tuple[Path, list[bytes]]) -> None:
    path, _ = recorded
    recovery, _ = recovered(path, len(list(read_events(path))))
    assert len(recovery.served) == 39
    assert {actor for actor, _ in recovery.served} == {"metrics"}


def test_a_log_that_is_decided_in_another_way_today_is_not_gone_on_from(recorded: tuple[Path, list[bytes]]) -> None:
    path, _ = recorded
    made = deciders()
    made["two"].state.tokens = 1
    with pytest.raises(NotRecoverable, match=r"of head \(two, .* decided in another way"):
        Recovery("head", SESSION, made, ("metrics",), 1000).read(read_events(path), BEGIN)


def test_a_log_with_a_damaged_event_is_not_gone_on_from_and_the_event_is_named(
    recorded: tuple[Path, list[bytes]],
) -> None:
    path, _ = recorded
    logged = [
        (event if event.sender.startswith("head") else event._replace(frame=event.frame[:-1]), decision)
        for event, decision in read_events(path)
    ]
    with pytest.raises(NotRecoverable, match=r"event \d+ of head \(.*\) is damaged \(.*\): --resume begins anew"):
        Recovery("head", SESSION, deciders(), ("metrics",), 1000).read(logged, BEGIN)


def test_a_log_that_is_refused_is_closed_by_the_thread_that_read_it(recorded: tuple[Path, list[bytes]]) -> None:
    path, _ = recorded
    made = deciders()
    made["two"].state.tokens = 1
    with pytest.raises(NotRecoverable) as refused:
        asyncio.run(asyncio.to_thread(recover, path, "head", SESSION, made, ("metrics",), 1000, BEGIN))
    assert refused.value.__traceback__ is not None  # which holds all that was being read
    still_open = [entry.resolve() for entry in Path("/proc/self/fd").iterdir()]
    assert path.resolve() not in still_open


def test_a_process_without_events_of_this_session_begins(recorded: tuple[Path, list[bytes]], tmp_path: Path) -> None:
    path, _ = recorded
    arguments = (deciders(), ("metrics",), 1000, BEGIN)
    assert recover(path, "head", SESSION, *arguments) is not None
    assert recover(path, "head", 2 * SESSION, *deciders_and(arguments)) is None
    assert recover(tmp_path / "none.sqlite", "head", SESSION, *deciders_and(arguments)) is None


def test_a_log_that_lacks_events_of_the_session_is_no_log_to_go_on_from(
    recorded: tuple[Path, list[bytes]], tmp_path: Path
) -> None:
    path = Path(shutil.copy(recorded[0], tmp_path / "head.sqlite"))
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("INSERT INTO gone VALUES (3, 7, 'LeaseReleased', 5)")
    with pytest.raises(UnusableLog, match="those since 1 are needed"):
        recover(path, "head", SESSION, deciders(), ("metrics",), 1000, BEGIN)


def deciders_and(arguments: tuple) -> tuple:
    return (deciders(), *arguments[1:])


def test_a_log_in_which_it_hears_what_it_never_told_itself_is_not_gone_on_from(
    recorded: tuple[Path, list[bytes]],
) -> None:
    path, _ = recorded
    frame = encode(Envelope("head/one", "head/two", LeaseReleased(999, 1)))
    logged = [
        (event._replace(frame=frame), decision) if event.sender == "head/one" else (event, decision)
        for event, decision in read_events(path)
    ]
    with pytest.raises(NotRecoverable, match=r"came from head itself, which did not send it"):
        Recovery("head", SESSION, deciders(), ("metrics",), 1000).read(logged, BEGIN)


def test_nothing_leaves_before_the_log_has_what_caused_it(tmp_path: Path) -> None:
    """Each time that the peer sees something, the event is in the file; nothing is acknowledged earlier either."""

    async def scenario() -> None:
        hub = Hub()
        head, peer = hub.join("head", 1000, SESSION), hub.join("peer", 1000)
        log = EventLog(tmp_path / "head.sqlite")
        loop = asyncio.create_task(DeciderLoop(head, log, deciders(), {"metrics": nothing}, lambda: 0.0).run())
        for number in range(20):
            await peer.send("head/one", LeaseReleased(number, 1))
            assert peer.unacknowledged.get("head", 0) > 0
            answer = await peer.receive()
            assert isinstance(answer.message, LeaseParked)
            assert number in _trajectories(tmp_path / "head.sqlite")
            await peer.receive()
        await peer.send("head", Shutdown())
        await loop
        log.close()

    asyncio.run(scenario())


def _trajectories(path: Path) -> set[int]:
    connection = sqlite3.connect(path)
    try:
        return {row[0] for row in connection.execute("SELECT trajectory FROM events")}
    finally:
        connection.close()


def test_no_service_is_told_of_what_the_log_has_not() -> None:
    """Nor does the loop end before it is told."""
    kept, told = Kept(), list[int]()

    async def note(message: AnyMessage) -> None:
        assert isinstance(message, MetricsRecorded)
        assert sum(event.actor == "two" for event in kept.events) >= message.step  # the number of the event
        told.append(message.step)

    async def scenario() -> None:
        hub = Hub()
        head, peer = hub.join("head", 1000, SESSION), hub.join("peer", 1000)
        for number in range(20):
            await peer.send("head/one", LeaseReleased(number, 1))
        await peer.send("head", Shutdown())
        log = MemoryLog(kept, Random(1))
        await DeciderLoop(head, log, deciders(), {"metrics": note}, lambda: 0.0).run()  # pyright: ignore

    run_virtually(scenario())
    assert told == list(range(1, 21))

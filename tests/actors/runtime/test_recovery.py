"""A deciding process recovers from a kill at any of its events."""

import asyncio
import contextlib
import shutil
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from random import Random

import msgspec
import pytest

from asterism.actors.runtime.decider_loop import DeciderLoop
from asterism.actors.runtime.recovery import NotRecoverable, Recovery, recover
from asterism.bus import messages as msg
from asterism.bus.bus import Bus
from asterism.bus.codec import decode, encode
from asterism.bus.event_log.reader import UnusableLog, read_events
from asterism.bus.event_log.records import Event
from asterism.bus.event_log.writer import EventLog
from asterism.bus.lanes import BULK, CONTROL
from asterism.bus.transport.in_process import Hub
from asterism.policies.decider import Send
from tests.simulation.memory_log import CommittedLog, MemoryLog

EPOCH = 1 << 20
START_FRAMES = [
    encode(msg.Envelope("head", f"head/{actor}", msg.RunStarted(0, msg.BufferCursor()))) for actor in ("one", "two")
]


class Totals(msgspec.Struct):
    events: int = 0
    tokens: int = 0


class Counting:
    """A decider that sends in both lanes, to the other decider of its process, and to a service."""

    def __init__(self, other: str) -> None:
        self._other = other
        self.state = Totals()

    def decide(self, now: float, event: msg.AnyMessage) -> Sequence[Send]:
        if isinstance(event, msg.LeaseReleased) and event.tokens == 13:
            raise msg.ProtocolError("unlucky")
        self.state.events += 1
        match event:
            case msg.RunStarted():
                return []
            case msg.LeaseReleased(trajectory_id=trajectory_id, tokens=tokens):
                self.state.tokens += tokens
                return [
                    Send("peer", msg.LeasePaused(trajectory_id, self.state.tokens)),
                    Send(f"head/{self._other}", msg.LeasePaused(trajectory_id, tokens)),
                    Send("peer/deep", msg.TurnFailed(trajectory_id, 0, 1, f"at {now}")),
                ]
            case _:
                return [Send("head/metrics", msg.MetricsRecorded("step", self.state.events, "", {}))]

    def get_state_after(self, event: msg.AnyMessage) -> msgspec.Struct | None:
        return self.state


def deciders() -> dict[str, Counting]:
    return {"one": Counting("two"), "two": Counting("one")}


async def record(folder: Path) -> list[bytes]:
    """Record 40 messages and their effects in `head.sqlite`, and return the frames that the peer received."""
    hub = Hub()
    head, peer = hub.join("head", 1000, EPOCH), hub.join("peer", 1000, EPOCH + 7)
    log = EventLog(folder / "head.sqlite")
    for frame in START_FRAMES:
        await head.send_frame("head", frame)
    for number in range(40):
        await peer.send(f"head/{'one' if number % 3 else 'two'}", msg.LeaseReleased(number, number))
    await peer.send("head", msg.Shutdown())
    clock = iter(range(1000))
    await DeciderLoop(head, log, deciders(), {"metrics": ignore}, lambda: float(next(clock))).run()
    log.close()
    return [await received(peer) for _ in range(peer.waiting)]


async def ignore(message: msg.AnyMessage) -> None:
    pass


async def received(bus: Bus) -> bytes:
    return (await bus.receive_delivery()).frame


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[bytes]]:
    folder = tmp_path_factory.mktemp("recorded")
    return folder / "head.sqlite", asyncio.run(record(folder))


@pytest.fixture
def path(recorded: tuple[Path, list[bytes]]) -> Path:
    return recorded[0]


def recovered(path: Path, num_events: int) -> tuple[Recovery, dict[str, Counting]]:
    """Recover from the first `num_events` events of the log; the last one has no decision yet."""
    recovered_deciders = deciders()
    recovery = Recovery("head", EPOCH, recovered_deciders, ("metrics",), window=1000)
    logged = list(read_events(path))[:num_events]
    recovery.replay([*logged[:-1], (logged[-1][0], None)], START_FRAMES)
    return recovery, recovered_deciders


def test_after_a_kill_at_any_event_recovery_has_sent_a_prefix_of_the_frames(recorded: tuple[Path, list[bytes]]) -> None:
    path, to_peer = recorded
    lanes = {CONTROL: [], BULK: []}
    for frame in to_peer:
        lanes[BULK if isinstance(decode(frame).message, msg.TurnFailed) else CONTROL].append(frame)
    total = len(list(read_events(path)))
    assert total > 80
    for count in range(2, total + 1, 5):
        recovery, recovered_deciders = recovered(path, count)
        assert sum(each.state.events for each in recovered_deciders.values()) + _refused(path, count) == count
        for lane, frames in lanes.items():
            number, sent = recovery.build_link_state().get(("peer", lane), (0, ()))
            assert list(sent) == frames[:number]
        assert [decision.seq for decision in recovery.undecided] == [count]
    assert recovery.build_link_state()["peer", BULK][0] == len(lanes[BULK]) == 39


def _refused(path: Path, count: int) -> int:
    messages = [decode(event.frame).message for event, _ in list(read_events(path))[:count]]
    return sum(isinstance(message, msg.LeaseReleased) and message.tokens == 13 for message in messages)


def test_received_frames_are_counted_from_the_log(path: Path) -> None:
    for count in range(2, len(list(read_events(path))) + 1, 5):
        events = [event for event, _ in list(read_events(path))[:count]]
        received_events = [event for event in events if event.sender == "peer"]
        recovery, _ = recovered(path, count)
        expected = {("peer", CONTROL): (EPOCH + 7, len(received_events))} if received_events else {}
        assert recovery.received == expected


def test_unread_messages_of_a_process_to_itself_are_in_its_inbox_after_recovery(path: Path) -> None:
    logged = [event for event, _ in read_events(path)]
    self_sent = [event.frame for event in logged if event.sender.startswith("head")]
    for count in range(1, len(logged) + 1, 5):
        recovery, _ = recovered(path, count)
        read = [event.frame for event in logged[:count] if event.sender.startswith("head")]
        waiting = list(recovery.build_link_state()["head", CONTROL][1])
        assert [*read, *waiting] == self_sent[: len(read) + len(waiting)]


@pytest.mark.parametrize("max_pending", [10, 1000])
def test_frames_that_waited_for_queue_space_are_kept(
    recorded: tuple[Path, list[bytes]], monkeypatch: pytest.MonkeyPatch, max_pending: int
) -> None:
    """At a kill, frames of the last events can be unsent, and a window of earlier frames unacknowledged."""
    monkeypatch.setattr("asterism.actors.runtime.recovery.MAX_PENDING_EFFECTS", max_pending)
    path, to_peer = recorded
    bulk = [frame for frame in to_peer if isinstance(decode(frame).message, msg.TurnFailed)]
    logged = list(read_events(path))
    recovery = Recovery("head", EPOCH, deciders(), ("metrics",), window=4)
    recovery.replay(logged, START_FRAMES)
    number, frames = recovery.build_link_state()["peer", BULK]
    assert number == len(bulk) == 39
    assert list(frames) == bulk[len(bulk) - len(frames) :]
    caused_late = sum(isinstance(decode(event.frame).message, msg.LeaseReleased) for event, _ in logged[-max_pending:])
    assert len(frames) >= min(39, caused_late + 4)
    assert (len(frames) < 39) == (max_pending == 10)


def test_service_messages_are_delivered_again(path: Path) -> None:
    recovery, _ = recovered(path, len(list(read_events(path))))
    assert len(recovery.service_messages) == 39
    assert {actor for actor, _ in recovery.service_messages} == {"metrics"}


def test_recovery_refuses_a_log_that_the_code_decides_differently(path: Path) -> None:
    recovered_deciders = deciders()
    recovered_deciders["two"].state.tokens = 1
    with pytest.raises(NotRecoverable, match=r"of head \(two, .*: the decision differs"):
        Recovery("head", EPOCH, recovered_deciders, ("metrics",), 1000).replay(read_events(path), START_FRAMES)


def test_recovery_refuses_a_damaged_event_and_names_it(path: Path) -> None:
    logged = [
        (event if event.sender.startswith("head") else event._replace(frame=event.frame[:-1]), decision)
        for event, decision in read_events(path)
    ]
    with pytest.raises(NotRecoverable, match=r"event \d+ of head \(.*\) is damaged \(.*\); --resume restarts"):
        Recovery("head", EPOCH, deciders(), ("metrics",), 1000).replay(logged, START_FRAMES)


def test_a_refused_log_is_closed_by_the_thread_that_read_it(path: Path) -> None:
    recovered_deciders = deciders()
    recovered_deciders["two"].state.tokens = 1
    with pytest.raises(NotRecoverable) as refused:
        asyncio.run(
            asyncio.to_thread(recover, path, "head", EPOCH, recovered_deciders, ("metrics",), 1000, START_FRAMES)
        )
    assert refused.value.__traceback__ is not None  # the traceback keeps the reader's frames alive
    still_open = [entry.resolve() for entry in Path("/proc/self/fd").iterdir()]
    assert path.resolve() not in still_open


def test_a_process_without_events_of_this_epoch_starts_without_recovery(path: Path, tmp_path: Path) -> None:
    missing = tmp_path / "none.sqlite"
    for log, epoch, is_recovered in ((path, EPOCH, True), (path, 2 * EPOCH, False), (missing, EPOCH, False)):
        recovery = recover(log, "head", epoch, deciders(), ("metrics",), 1000, START_FRAMES)
        assert (recovery is not None) == is_recovered


def test_recovery_refuses_a_log_with_gaps(path: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copy(path, tmp_path / "head.sqlite"))
    with contextlib.closing(sqlite3.connect(copy)) as connection, connection:
        connection.execute("INSERT INTO gone VALUES (3, 7, 'LeaseReleased', 5)")
    with pytest.raises(UnusableLog, match="events from number 1 on are needed"):
        recover(copy, "head", EPOCH, deciders(), ("metrics",), 1000, START_FRAMES)


def test_recovery_refuses_a_message_that_its_process_never_sent_to_itself(path: Path) -> None:
    frame = encode(msg.Envelope("head/one", "head/two", msg.LeaseReleased(999, 1)))
    logged = [
        (event._replace(frame=frame), decision) if event.sender == "head/one" else (event, decision)
        for event, decision in read_events(path)
    ]
    with pytest.raises(NotRecoverable, match=r"head sent it to itself in the log"):
        Recovery("head", EPOCH, deciders(), ("metrics",), 1000).replay(logged, START_FRAMES)


@pytest.mark.real_clock
async def test_no_effect_leaves_before_its_event_is_in_the_log(tmp_path: Path) -> None:
    """When the peer receives a frame, the event is in the file; no event is acknowledged earlier."""
    hub = Hub()
    head, peer = hub.join("head", 1000, EPOCH), hub.join("peer", 1000)
    log = EventLog(tmp_path / "head.sqlite")
    loop = asyncio.create_task(DeciderLoop(head, log, deciders(), {"metrics": ignore}, lambda: 0.0).run())
    for number in range(20):
        await peer.send("head/one", msg.LeaseReleased(number, 1))
        assert peer.unacknowledged.get("head", 0) > 0
        answer = await peer.receive()
        assert isinstance(answer.message, msg.LeasePaused)
        assert number in _trajectories(tmp_path / "head.sqlite")
        await peer.receive()
    await peer.send("head", msg.Shutdown())
    await loop
    log.close()


def _trajectories(path: Path) -> set[int]:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return {row[0] for row in connection.execute("SELECT trajectory FROM events")}


async def test_services_receive_no_message_before_its_event_is_in_the_log() -> None:
    """The loop ends only after the last message is delivered."""
    kept, steps = CommittedLog(), list[int]()

    async def note(message: msg.AnyMessage) -> None:
        assert isinstance(message, msg.MetricsRecorded)
        assert sum(event.actor == "two" for event in kept.events) >= message.step  # the step is the number of the event
        steps.append(message.step)

    hub = Hub()
    head, peer = hub.join("head", 1000, EPOCH), hub.join("peer", 1000)
    for number in range(20):
        await peer.send("head/one", msg.LeaseReleased(number, 1))
    await peer.send("head", msg.Shutdown())
    log = MemoryLog(kept, Random(1))
    await DeciderLoop(head, log, deciders(), {"metrics": note}, lambda: 0.0).run()  # pyright: ignore
    assert steps == list(range(1, 21))


class Batching:
    """A decider that sends a group and a batch for each requested step."""

    def decide(self, now: float, event: msg.AnyMessage) -> Sequence[Send]:
        if isinstance(event, msg.StepRequested):
            return [
                Send("learner", msg.GroupAccepted(event.step, 0, 0, ())),
                Send("learner", msg.BatchReady(event.step, ())),
            ]
        return []

    def get_state_after(self, event: msg.AnyMessage) -> msgspec.Struct | None:
        return None


def test_recovery_keeps_only_the_batches_that_the_learner_has_not_trained() -> None:
    senders = {msg.StepRequested: "head/recipe", msg.StepTrained: "learner"}
    sent = [
        msg.StepRequested(1, 0),
        msg.StepRequested(2, 0),
        msg.StepTrained(1, {}),
        msg.StepTrained(1, {}),
        msg.StepRequested(3, 1),
    ]
    frames = [encode(msg.Envelope(senders[type(message)], "head/one", message)) for message in sent]
    events = [
        Event(
            seq,
            0.0,
            "one",
            "other" if isinstance(message, msg.StepRequested) else "learner",
            EPOCH,
            seq,
            type(message).__name__,
            None,
            frame,
        )
        for seq, (message, frame) in enumerate(zip(sent, frames, strict=True), start=1)
    ]
    recovery = Recovery("head", EPOCH, {"one": Batching()}, (), window=100)
    recovery.replay([(event, None) for event in events], [])
    next_number, kept = recovery.build_link_state()["learner", BULK]
    assert next_number == 6
    assert [decode(frame).message for frame in kept] == [
        message for step in (2, 3) for message in (msg.GroupAccepted(step, 0, 0, ()), msg.BatchReady(step, ()))
    ]

"""Tests: the event log removes events of old steps, keeps permanent kinds, and counts removed events."""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event

import pytest

from asterism.bus import messages as msg
from asterism.bus.codec import encode
from asterism.bus.event_log import retention
from asterism.bus.event_log.reader import UnusableLog, check_complete, list_removed_events, read_events
from asterism.bus.event_log.writer import EventLog
from asterism.bus.messages.run import BufferCursor


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "CHUNK_EVENTS", 3)


class Writer:
    """A writer that commits each event separately."""

    def __init__(self, path: Path, keep_steps: int) -> None:
        self.path = path
        self._committed = Event()
        self._log = EventLog(path, keep_steps=keep_steps)
        self._log.on_commit = lambda _: self._committed.set()

    def write(self, *messages: msg.AnyMessage) -> None:
        for message in messages:
            self._committed.clear()
            frame = encode(msg.Envelope("x", "head/buffer", message))
            trajectory = getattr(message, "trajectory_id", None)
            seq = self._log.append(1.0, "buffer", "x", type(message).__name__, trajectory, frame)
            self._log.append_decision(seq, b"done", None)
            assert self._committed.wait(10.0)

    def flush_removals(self, events: int = 20) -> None:
        """Write these additional events: their commits remove all old events."""
        self.write(*[msg.AdmissionContinued()] * events)

    def close(self) -> None:
        self._log.close()

    def step(self, step: int, events: int = 5) -> None:
        self.write(*(msg.LeaseReleased(100 * step + number, 1) for number in range(events)), msg.StepTrained(step, {}))

    def list_trajectories(self) -> list[int]:
        return [event.trajectory for event, _ in read_events(self.path) if event.trajectory is not None]


STARTED = msg.RunStarted(0, BufferCursor())


@pytest.fixture
def open_log(tmp_path: Path) -> Iterator[Callable[[int], Writer]]:
    writers: list[Writer] = []

    def open_writer(keep_steps: int) -> Writer:
        writers.append(Writer(tmp_path / "log.sqlite", keep_steps))
        return writers[-1]

    yield open_writer
    for writer in writers:
        writer.close()


def test_only_permanent_kinds_and_events_of_the_last_finished_steps_are_kept(open_log: Callable[[int], Writer]) -> None:
    log = open_log(2)
    log.write(STARTED)
    for step in range(1, 6):
        log.step(step)
    log.flush_removals()
    assert {trajectory // 100 for trajectory in log.list_trajectories()} == {4, 5}
    kinds = Counter(event.kind for event, _ in read_events(log.path))
    del kinds["AdmissionContinued"]
    assert kinds == {"RunStarted": 1, "StepTrained": 5, "LeaseReleased": 10}
    assert sum(removed.events for removed in list_removed_events(log.path)) == 15
    assert all(decision is not None for _, decision in read_events(log.path))


def test_without_keep_steps_all_events_are_kept(open_log: Callable[[int], Writer]) -> None:
    log = open_log(0)
    for step in range(1, 6):
        log.step(step)
    assert len(log.list_trajectories()) == 25
    assert list_removed_events(log.path) == []


def test_a_rollout_process_derives_finished_steps_from_the_versions_of_turns(open_log: Callable[[int], Writer]) -> None:
    log = open_log(1)
    for version in range(4):
        versions = version.to_bytes(4, "little", signed=True)
        for number in range(4):
            turn = msg.TurnGenerated(100 * version + number, 0, 1, bytes(4), bytes(4), versions, "stop")
            log.write(turn)
    log.flush_removals()
    assert min(log.list_trajectories()) == 200  # a turn of version 3 implies that three steps are finished


def test_a_turn_without_tokens_finishes_no_step(open_log: Callable[[int], Writer]) -> None:
    log = open_log(1)
    log.step(1)
    log.write(msg.TurnGenerated(100, 0, 1, b"", b"", b"", "abort"))
    log.flush_removals()
    assert log.list_trajectories() == [*range(100, 105), 100]


def test_each_commit_removes_a_bounded_number_of_events(open_log: Callable[[int], Writer]) -> None:
    log = open_log(1)
    log.step(1, events=20)
    log.step(2, events=1)
    assert len(log.list_trajectories()) == 20 + 1 - 3
    log.write(msg.LeaseReleased(999, 1))
    assert len(log.list_trajectories()) == 20 + 1 - 6 + 1


def test_removed_events_are_counted_for_each_launch(open_log: Callable[[int], Writer]) -> None:
    log = open_log(1)
    log.write(STARTED)
    log.step(1, events=4)
    log.write(STARTED)
    log.step(2, events=7)
    log.step(3, events=2)
    log.flush_removals()
    (_, second) = (event.seq for event, _ in read_events(log.path, kinds=["RunStarted"]))
    assert sum(removed.events for removed in list_removed_events(log.path) if removed.last < second) == 4
    assert sum(removed.events for removed in list_removed_events(log.path) if removed.first >= second) == 7


def test_recovery_refuses_a_log_with_gaps(open_log: Callable[[int], Writer]) -> None:
    log = open_log(1)
    log.write(STARTED)
    check_complete(log.path, since_seq=1)
    for step in (1, 2, 3):
        log.step(step)
    log.flush_removals()
    with pytest.raises(
        UnusableLog, match=r"log.keep_steps has removed events up to number \d+; events from number 1 on are needed"
    ):
        check_complete(log.path, since_seq=1)
    check_complete(log.path, since_seq=1 + max(removed.last for removed in list_removed_events(log.path)))

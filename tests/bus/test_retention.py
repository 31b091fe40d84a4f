"""What is older than so many finished steps goes; what a resumed run and the summary need stays, and counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event

import pytest

from bus import retention
from bus.codec import encode
from bus.event_log import EventLog
from bus.event_reading import UnusableLog, check_whole, missing, read_events
from bus.messages import AdmissionContinued, AnyMessage, Envelope, LeaseReleased, RunStarted, StepTrained, TurnGenerated
from bus.messages.run import BufferCursor


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "CHUNK", 3)


class Writer:
    """Every event is a commit of its own."""

    def __init__(self, path: Path, keep_steps: int) -> None:
        self.path = path
        self._committed = Event()
        self._log = EventLog(path, keep_steps=keep_steps)
        self._log.on_commit = lambda _: self._committed.set()

    def write(self, *messages: AnyMessage) -> None:
        for message in messages:
            self._committed.clear()
            frame = encode(Envelope("x", "head/buffer", message))
            about = getattr(message, "trajectory_id", None)
            seq = self._log.append(1.0, "buffer", "x", type(message).__name__, about, frame)
            self._log.decided(seq, b"done", None)
            assert self._committed.wait(10.0)

    def settle(self, events: int = 20) -> None:
        """So many more commits, for what is to go."""
        self.write(*[AdmissionContinued()] * events)

    def close(self) -> None:
        self._log.close()

    def step(self, step: int, events: int = 5) -> None:
        self.write(*(LeaseReleased(100 * step + number, 1) for number in range(events)), StepTrained(step, {}))

    def kept(self) -> list[int]:
        """Trajectories of the events that are no steps."""
        return [event.trajectory for event, _ in read_events(self.path) if event.trajectory is not None]


BEGIN = RunStarted(0, BufferCursor())


@pytest.fixture
def keeping(tmp_path: Path) -> Iterator[Callable[[int], Writer]]:
    writers: list[Writer] = []

    def open_one(keep_steps: int) -> Writer:
        writers.append(Writer(tmp_path / "log.sqlite", keep_steps))
        return writers[-1]

    yield open_one
    for writer in writers:
        writer.close()


def test_events_of_the_last_finished_steps_are_kept_and_older_ones_go(keeping: Callable[[int], Writer]) -> None:
    log = keeping(2)
    log.write(BEGIN)
    for step in range(1, 6):
        log.step(step)
    log.settle()
    assert {trajectory // 100 for trajectory in log.kept()} == {4, 5}
    kinds = Counter(event.kind for event, _ in read_events(log.path))
    del kinds["AdmissionContinued"]
    assert kinds == {"RunStarted": 1, "StepTrained": 5, "LeaseReleased": 10}  # what a resumed run needs stays
    assert sum(each.events for each in missing(log.path)) == 15
    assert all(decision is not None for _, decision in read_events(log.path))


def test_without_keep_steps_all_is_kept(keeping: Callable[[int], Writer]) -> None:
    log = keeping(0)
    for step in range(1, 6):
        log.step(step)
    assert len(log.kept()) == 25
    assert missing(log.path) == []


def test_a_rollout_process_knows_the_steps_by_the_versions_of_its_turns(keeping: Callable[[int], Writer]) -> None:
    log = keeping(1)
    for version in range(4):
        versions = version.to_bytes(4, "little", signed=True)
        for number in range(4):
            turn = TurnGenerated(100 * version + number, 0, 1, bytes(4), bytes(4), versions, "stop")
            log.write(turn)
    log.settle()
    assert min(log.kept()) == 200  # version 3 is of three finished steps: what came before version 2 is gone


def test_a_turn_without_tokens_tells_of_no_step(keeping: Callable[[int], Writer]) -> None:
    log = keeping(1)
    log.step(1)
    log.write(TurnGenerated(100, 0, 1, b"", b"", b"", "abort"))
    log.settle()
    assert log.kept() == [*range(100, 105), 100]


def test_each_commit_looks_at_a_bounded_number_of_events(keeping: Callable[[int], Writer]) -> None:
    log = keeping(1)
    log.step(1, events=20)
    log.step(2, events=1)
    assert len(log.kept()) == 20 + 1 - 3
    log.write(LeaseReleased(999, 1))
    assert len(log.kept()) == 20 + 1 - 6 + 1


def test_what_is_gone_is_counted_in_the_life_that_it_was_of(keeping: Callable[[int], Writer]) -> None:
    log = keeping(1)
    log.write(BEGIN)
    log.step(1, events=4)
    log.write(BEGIN)
    log.step(2, events=7)
    log.step(3, events=2)
    log.settle()
    (_, second) = (event.seq for event, _ in read_events(log.path, kinds=["RunStarted"]))
    assert sum(each.events for each in missing(log.path) if each.last < second) == 4
    assert sum(each.events for each in missing(log.path) if each.first >= second) == 7


def test_who_must_rebuild_a_decider_from_a_log_with_gaps_is_refused(keeping: Callable[[int], Writer]) -> None:
    log = keeping(1)
    log.write(BEGIN)
    check_whole(log.path, since=1)
    for step in (1, 2, 3):
        log.step(step)
    log.settle()
    with pytest.raises(
        UnusableLog, match=r"log.keep_steps has removed events up to number \d+; those since 1 are needed"
    ):
        check_whole(log.path, since=1)
    check_whole(log.path, since=1 + max(each.last for each in missing(log.path)))

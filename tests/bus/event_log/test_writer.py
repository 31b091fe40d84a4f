"""Tests of an event log: writing, reading, kills during a write, and errors of the disk."""

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asterism.bus.event_log import writer as event_log
from asterism.bus.event_log.reader import (
    UnusableLog,
    find_epoch_start,
    list_removed_events,
    read_events,
    read_first_time,
)
from asterism.bus.event_log.writer import EventLog, EventLogFailure

events = st.lists(
    st.tuples(
        st.floats(0, 1e9), st.sampled_from(["buffer", "arbiter"]), st.none() | st.integers(0, 5), st.binary(max_size=20)
    ),
    max_size=30,
)


def write_log(path: Path, *appended: tuple, **options: bool) -> Path:  # pyright: ignore
    """Write a log with these events; each event is a tuple of the arguments of `append`."""
    log = EventLog(path, **options)
    for event in appended:
        log.append(*event)
    log.close()
    return path


@settings(max_examples=5)
@given(events)
def test_events_are_read_in_the_order_of_their_appends(
    tmp_path_factory: pytest.TempPathFactory, appended: list[tuple]
) -> None:  # pyright: ignore
    path = tmp_path_factory.mktemp("log") / "log.sqlite"
    log = EventLog(path)
    for time, actor, trajectory, frame in appended:
        seq = log.append(time, actor, "sender", "Kind", trajectory, frame)
        log.append_decision(seq, frame[:8], None)
    log.close()
    read = [(event.time, event.actor, event.trajectory, event.frame) for event, _ in read_events(path)]
    assert read == appended
    assert all(decision is not None and decision.effects == event.frame[:8] for event, decision in read_events(path))
    of_trajectory = [event.frame for event, _ in read_events(path, trajectory=3)]
    assert of_trajectory == [frame for _, _, trajectory, frame in appended if trajectory == 3]


def test_an_event_with_several_trajectories_is_found_for_each_of_them(tmp_path: Path) -> None:
    path = write_log(
        tmp_path / "log.sqlite",
        (1.0, "rollout-0", "a", "StartGroup", range(8, 12), b"group 1"),
        (2.0, "rollout-0", "a", "StartGroup", range(12, 16), b"group 2"),
        (3.0, "rollout-0", "a", "LeaseGranted", 11, b"lease"),
        (4.0, "rollout-0", "a", "GroupAborted", range(8, 12), b"abort"),
    )
    frames_by_trajectory = {
        trajectory: [event.frame for event, _ in read_events(path, trajectory=trajectory, with_group=True)]
        for trajectory in (7, 8, 11, 12, 16)
    }
    assert frames_by_trajectory == {
        7: [],
        8: [b"group 1", b"abort"],
        11: [b"group 1", b"lease", b"abort"],
        12: [b"group 2"],
        16: [],
    }
    assert [event.frame for event, _ in read_events(path, trajectory=11)] == [b"lease"]


def test_events_are_filtered_by_kind_actor_and_time(tmp_path: Path) -> None:
    events = ((1.0, "a", "K"), (2.0, "b", "K"), (3.0, "a", "L"), (4.0, "a", "K"))
    path = write_log(tmp_path / "log.sqlite", *((time, actor, "x", kind, None, b"") for time, actor, kind in events))
    assert [event.time for event, _ in read_events(path, actor="a", kinds=["K"])] == [1.0, 4.0]
    assert [event.time for event, _ in read_events(path, time_range=(2.0, 4.0))] == [2.0, 3.0]
    assert [event.time for event, _ in read_events(path, since_seq=4)] == [4.0]


def test_a_folder_name_with_special_characters_is_accepted(tmp_path: Path) -> None:
    path = write_log(tmp_path / "50%20 #1?mode=x" / "log.sqlite", (1.0, "a", "x", "K", None, b""))
    assert [event.time for event, _ in read_events(path)] == [1.0]


def test_an_empty_log_has_no_events_and_no_first_time(tmp_path: Path) -> None:
    path = tmp_path / "log.sqlite"
    assert find_epoch_start(path, 0) is None
    path.touch()
    assert list(read_events(path)) == list_removed_events(path) == []
    assert read_first_time(path) is find_epoch_start(path, 0) is None
    EventLog(path).close()
    assert read_first_time(path) is find_epoch_start(path, 0) is None


@pytest.mark.parametrize("content", [b"this is no event log, " * 1000, None])
def test_the_error_for_a_damaged_or_missing_log_names_the_file(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "log.sqlite"
    if content is not None:
        path.write_bytes(content)
    for read in (lambda: next(read_events(path)), lambda: read_first_time(path), lambda: list_removed_events(path)):
        with pytest.raises(UnusableLog, match=f"^{path}: cannot be read as an event log: "):
            read()


def test_long_frames_are_compressed_without_loss(tmp_path: Path) -> None:
    frames = [bytes(range(256)) * 8, b"a word and another " * 100, bytes(4000), b"\x01" * 511, b"\x93short"]
    events = ((0.0, "a", "b", "Kind", None, frame) for frame in frames)
    path = write_log(tmp_path / "log.sqlite", *events, compress=True)
    assert [event.frame for event, _ in read_events(path)] == frames
    with contextlib.closing(sqlite3.connect(path)) as connection:
        lengths = [length for (length,) in connection.execute("SELECT length(frame) FROM events ORDER BY seq")]
    assert lengths[1] < 100
    assert lengths[2] < 100
    assert lengths[3:] == [512, 6]  # one byte more than the frame: the marker


def test_an_event_without_a_decision_has_the_decision_none(tmp_path: Path) -> None:
    ((_, decision),) = read_events(write_log(tmp_path / "log.sqlite", (1.0, "buffer", "a", "Kind", None, b"x")))
    assert decision is None


def test_a_reopened_log_continues_its_numbers(tmp_path: Path) -> None:
    for number in range(3):
        log = EventLog(tmp_path / "log.sqlite")
        assert log.append(0.0, "a", "b", "Kind", None, b"") == number + 1
        log.close()
    assert len(list(read_events(tmp_path / "log.sqlite"))) == 3


def test_closing_a_log_commits_immediately(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "_GROUP_COMMIT_S", 3600.0)
    write_log(tmp_path / "log.sqlite", (1.0, "buffer", "a", "Kind", None, b"x"))
    assert [event.frame for event, _ in read_events(tmp_path / "log.sqlite")] == [b"x"]


def test_the_error_for_an_unwritable_path_names_the_path(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EventLogFailure, match="file"):
        EventLog(tmp_path / "file" / "log.sqlite")


def test_closing_a_log_raises_the_error_of_a_failed_write(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "log.sqlite")
    with sqlite3.connect(tmp_path / "log.sqlite") as connection:
        connection.execute("DROP TABLE decisions")
    connection.close()
    log.append(0.0, "a", "b", "Kind", None, b"")
    log.append_decision(1, b"", None)
    with pytest.raises(EventLogFailure, match="decisions"):
        log.close()


def test_the_owner_receives_every_error_of_the_writer_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(log: EventLog, group: object) -> None:
        raise RuntimeError("unexpected")

    monkeypatch.setattr(EventLog, "_commit", broken)
    log, notified = EventLog(tmp_path / "log.sqlite"), threading.Event()
    log.on_commit = lambda seq: notified.set()
    log.append(0.0, "a", "b", "Kind", None, b"")
    assert notified.wait(30)
    for use in (lambda: log.append(0.0, "a", "b", "Kind", None, b""), log.raise_if_failed, log.close):
        with pytest.raises(EventLogFailure, match=r"log\.sqlite: unexpected") as failed:
            use()
        assert isinstance(failed.value.__cause__, RuntimeError)


FULL_DISK_SCRIPT = """
import subprocess, sys
from pathlib import Path
from asterism.bus.event_log import writer as event_log
from asterism.bus.event_log.writer import EventLog, EventLogFailure
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", {folder!r}], check=True)
log = EventLog(Path({folder!r}) / "log.sqlite")
try:
    for number in range(1000):
        log.append(0.0, "a", "b", "Kind", None, bytes(10_000))
        if number % 100 == 99:
            log.wait_for_space()
    log.close()
except EventLogFailure as error:
    print(error)
"""


@pytest.mark.slow
def test_the_error_for_a_full_disk_names_the_path(tmp_path: Path) -> None:
    unshare = ["unshare", "--user", "--map-root-user", "--mount"]
    script = FULL_DISK_SCRIPT.format(folder=str(tmp_path))
    done = subprocess.run([*unshare, sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"{tmp_path}/log.sqlite: database or disk is full" in done.stdout


def test_a_wait_for_space_ends_when_the_writer_thread_has_caught_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = threading.Semaphore(0)
    next_group = EventLog._collect_group  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(EventLog, "_collect_group", lambda log: groups.acquire() and next_group(log))
    monkeypatch.setattr(event_log, "MAX_QUEUED_RECORDS", 3)
    log = EventLog(tmp_path / "log.sqlite")
    for number in range(5):
        log.append(float(number), "a", "b", "Kind", None, b"frame")
    assert log.is_full
    waiting = threading.Thread(target=log.wait_for_space)
    waiting.start()
    groups.release(1000)
    waiting.join()
    assert not log.is_full
    log.close()


def test_a_wait_for_space_raises_the_error_of_a_failed_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "MAX_QUEUED_RECORDS", 3)
    failed = threading.Event()
    log = EventLog(tmp_path / "log.sqlite")
    log.on_commit = lambda seq: failed.set()
    log.append(1.0, "a", "b", "Kind", 1 << 63, b"frame")
    assert failed.wait(30)
    for number in range(5):
        log.append_decision(number, b"", None)
    with pytest.raises(EventLogFailure, match="too large"):
        log.wait_for_space()


WRITER_SCRIPT = """
import sys
from pathlib import Path
from asterism.bus.event_log import writer as event_log
from asterism.bus.event_log.writer import EventLog
log = EventLog(Path(sys.argv[1]))
for number in range(10_000_000):
    log.append(float(number), "a", "b", "Kind", number, b"x" * 50)
    if number == 20_000:
        log.wait_for_space()
        print("ready", flush=True)
    if log.is_full:
        log.wait_for_space()
"""


@pytest.mark.slow
def test_kill_9_during_a_write_leaves_no_partial_event(tmp_path: Path) -> None:
    path = tmp_path / "log.sqlite"
    writer = subprocess.Popen([sys.executable, "-c", WRITER_SCRIPT, str(path)], stdout=subprocess.PIPE)
    assert writer.stdout is not None
    writer.stdout.readline()
    while not list(read_events(path, trajectory=100)):
        pass
    os.kill(writer.pid, signal.SIGKILL)
    writer.wait()
    writer.stdout.close()
    read = [event for event, _ in read_events(path)]
    assert [event.seq for event in read] == list(range(1, len(read) + 1))
    assert all(event.frame == b"x" * 50 for event in read)
    EventLog(path).close()  # the log can be opened for writing

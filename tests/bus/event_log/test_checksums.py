"""Tests: a checksum detects a changed value of any column, and logs of another version are refused."""

import contextlib
import random
import sqlite3
from pathlib import Path

import pytest

from asterism.bus.event_log.reader import UnusableLog, read_events
from asterism.bus.event_log.records import SCHEMA_VERSION
from asterism.bus.event_log.writer import EventLog, EventLogFailure

NUM_EVENTS = 20


def append(path: Path, number: int) -> None:
    log = EventLog(path, compress=True)
    for each in range(number):
        trajectories = range(each, each + 3) if each % 5 == 0 else each
        frame = bytes(range(256)) * 8 if each % 2 else b"short"
        seq = log.append(1.5 + each, "buffer", "head", f"Kind{each % 3}", trajectories, frame, epoch=1, number=each)
        log.append_decision(seq, b"effects", b"state")
    log.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    append(tmp_path / "log.sqlite", NUM_EVENTS)
    return tmp_path / "log.sqlite"


def execute(path: Path, sql: str, *values: object) -> None:
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(sql, values)


CHANGES = [
    *(("time", "time + 1"), ("actor", "'buffet'"), ("sender", "'tail'"), ("epoch", "2"), ("number", "number + 1")),
    *(("kind", "'Kind9'"), ("trajectory", "77"), ("trajectory", "NULL"), ("frame", "x'73686f7274'")),
    ("frame", "x'00'"),
    ("checksum", "checksum + 1"),
]


@pytest.mark.parametrize(("column", "value"), CHANGES)
def test_an_event_with_a_changed_column_is_refused_with_its_number(path: Path, column: str, value: str) -> None:
    execute(path, f"UPDATE events SET {column} = {value} WHERE seq = 8")
    with pytest.raises(UnusableLog, match=r"log\.sqlite: event 8 is damaged: it differs from its checksum"):
        list(read_events(path))


def test_an_event_with_a_changed_number_is_refused(path: Path) -> None:
    execute(path, f"UPDATE events SET seq = {NUM_EVENTS + 1} WHERE seq = 8")
    with pytest.raises(UnusableLog, match=f"event {NUM_EVENTS + 1} is damaged"):
        list(read_events(path))


@pytest.mark.parametrize("column", ["seq", "first", "last"])
def test_a_changed_range_of_trajectories_is_refused(path: Path, column: str) -> None:
    execute(path, f"UPDATE groups SET {column} = {column} + 1 WHERE seq = 6")
    with pytest.raises(UnusableLog, match=r"event [67] is damaged"):
        list(read_events(path, trajectory=5, with_group=True))


def test_a_flipped_byte_is_refused_or_changes_no_event(path: Path) -> None:
    events = [event for event, _ in read_events(path)]
    content, chosen = path.read_bytes(), random.Random(3)
    for _ in range(64):
        damaged = bytearray(content)
        damaged[chosen.randrange(len(content))] ^= 1 << chosen.randrange(8)
        path.write_bytes(damaged)
        with contextlib.suppress(UnusableLog):
            found = [event for event, _ in read_events(path)]
            assert found == events


def test_a_log_of_another_version_is_refused_with_both_versions(path: Path) -> None:
    execute(path, "UPDATE meta SET value = '5' WHERE key = 'schema_version'")
    with pytest.raises(UnusableLog, match=f"of schema version 5, this program reads {SCHEMA_VERSION}; read it with"):
        list(read_events(path))
    with pytest.raises(EventLogFailure, match="of schema version 5"):
        EventLog(path)

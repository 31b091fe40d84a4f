"""Records and tables of an event log.

Each row of events and groups has a checksum, so that a reader finds a damaged row. A damaged decision differs from the
decision of a replay. Frames of version 6 have the messages of bus/messages; logs of earlier versions are refused.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import xxhash

SCHEMA_VERSION = 6
SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS events (
    seq INTEGER PRIMARY KEY,
    time REAL NOT NULL,           -- Unix time in seconds, by the process's monotonic clock
    actor TEXT NOT NULL,          -- receiver
    sender TEXT NOT NULL,
    epoch INTEGER NOT NULL,       -- of the sender's process
    number INTEGER NOT NULL,      -- in the sender's lane: asterism.bus.transport.reliable_stream
    kind TEXT NOT NULL,           -- class of the message
    trajectory INTEGER,           -- NULL if the message concerns none or several
    frame BLOB NOT NULL,          -- envelope as received: asterism.bus.event_log.compression
    checksum INTEGER NOT NULL     -- of the other columns
);
CREATE INDEX IF NOT EXISTS events_trajectory ON events (trajectory) WHERE trajectory IS NOT NULL;
CREATE TABLE IF NOT EXISTS groups (
    seq INTEGER PRIMARY KEY,      -- event that concerns several trajectories
    first INTEGER NOT NULL,       -- first trajectory
    last INTEGER NOT NULL,
    checksum INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS groups_first ON groups (first, last);
CREATE TABLE IF NOT EXISTS decisions (
    seq INTEGER PRIMARY KEY,      -- event
    effects BLOB NOT NULL,        -- fingerprint of the effects, in order
    state BLOB                    -- fingerprint of the decider's next state; NULL if it has none
);
CREATE TABLE IF NOT EXISTS steps (
    step INTEGER PRIMARY KEY,     -- finished step; recorded only if old events are removed
    seq INTEGER NOT NULL          -- first event that reports it
);
CREATE TABLE IF NOT EXISTS gone (
    first INTEGER NOT NULL,       -- events with numbers from first to last were removed
    last INTEGER NOT NULL,
    kind TEXT NOT NULL,
    events INTEGER NOT NULL,      -- number of removed events of this kind
    PRIMARY KEY (first, kind)
);
"""


class Event(NamedTuple):
    seq: int
    time: float
    actor: str
    sender: str
    epoch: int
    number: int
    kind: str
    trajectory: int | None
    frame: bytes


REFUSED_FINGERPRINT = b"refused"  # fingerprint for an event that the decider refused


class Decision(NamedTuple):
    seq: int
    effects: bytes
    state: bytes | None

    @property
    def is_refused(self) -> bool:
        return self.effects == REFUSED_FINGERPRINT


class TrajectoryRange(NamedTuple):
    """The range of the trajectories of an event that concerns several."""

    seq: int
    first: int
    last: int


class RemovedEvents(NamedTuple):
    """Removed events of one kind, numbered from `first` to `last`."""

    first: int
    last: int
    kind: str
    events: int


Record = Event | Decision | TrajectoryRange

_encode_row = msgspec.msgpack.Encoder().encode


def compute_checksum(row: Sequence[object]) -> int:
    """Return the checksum of a row's other columns as a signed 64-bit integer, which SQLite stores."""
    return int.from_bytes(xxhash.xxh3_64_digest(_encode_row(row)), "big", signed=True)

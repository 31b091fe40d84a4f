"""Edits an event log. The rows get new checksums, so that readers find no damage."""

import contextlib
import sqlite3
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from asterism.bus.event_log.records import compute_checksum
from asterism.configs.file_manifest import MANIFEST_NAME


@contextmanager
def editing_log(path: Path) -> Generator[sqlite3.Connection]:
    """Yield a connection to the log. Remove the run folder's manifest, and update the checksums at the end."""
    (path.parent.parent / MANIFEST_NAME).unlink(missing_ok=True)
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        yield connection
        for table in ("events", "groups"):
            for *row, _ in connection.execute(f"SELECT * FROM {table}").fetchall():
                connection.execute(f"UPDATE {table} SET checksum = ? WHERE seq = ?", (compute_checksum(row), row[0]))

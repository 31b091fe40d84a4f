"""Structured logs: JSON lines in `runs/NAME/logs/PROCESS.jsonl`, one event per line.

An event is a constant `noun.past_verb`; its data is in keys with units. A file contains only
complete lines: on a full disk, a partial line is removed and the process is notified so that it
exits.
"""

import logging
import os
from collections.abc import Callable
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, cast

import msgspec
import structlog

from asterism.bus.process.exit_reason import exit_now
from asterism.configs.atomic_write import DiskError, raising_disk_errors
from asterism.configs.run_folder import RunFolder

DiskErrorHandler = Callable[[DiskError], None]


class LogFile:
    """A file for structlog's BytesLogger. Lines are unbuffered: a kill loses no line."""

    def __init__(self, file: FileIO, on_disk_error: DiskErrorHandler) -> None:
        """Take a `file` that is open for appending and has no other writer."""
        self._file = file
        self._on_disk_error = on_disk_error

    def write(self, line: bytes) -> None:
        """Write the complete line, or write nothing and call `on_disk_error`."""
        written = 0
        try:
            with raising_disk_errors(Path(str(self._file.name))):
                while written < len(line):
                    written += self._file.write(line[written:])
        except DiskError as error:
            if written:
                self._file.truncate(os.fstat(self._file.fileno()).st_size - written)
            self._on_disk_error(error)

    def flush(self) -> None:
        """Do nothing: lines are not buffered."""


def configure_logging(
    folder: RunFolder, process: str, level: str = "info", on_disk_error: DiskErrorHandler | None = None
) -> None:
    """Log to the process's file. A write error calls `on_disk_error`, which exits by default."""
    folder.logs.mkdir(parents=True, exist_ok=True)
    file = (folder.logs / f"{process}.jsonl").open("ab", buffering=0)
    stream = LogFile(file, on_disk_error or partial(exit_now, folder, process))
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(serializer=_to_json),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.BytesLoggerFactory(cast(BinaryIO, stream)),
        cache_logger_on_first_use=False,
    )
    structlog.contextvars.bind_contextvars(process=process)


def _to_json(entry: Any, **_: Any) -> bytes:
    return msgspec.json.encode(entry, enc_hook=str)

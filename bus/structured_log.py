"""Structured logs: JSON lines in `runs/NAME/logs/PROCESS.jsonl`, one event a line.

An event is a constant `noun.past_verb`; its data stands in keys with units. A file has whole lines alone: what a disk has
no room for is cut off again, and the process is told, which is to end.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, cast

import msgspec
import structlog

from bus.last_words import end_at_once
from configs.disk import DiskRefused, writing
from configs.run_folder import RunFolder

Refused = Callable[[DiskRefused], None]


class LogFile:
    """As structlog's BytesLogger takes one. Lines are flushed as they are written: a kill loses none."""

    def __init__(self, file: FileIO, refused: Refused) -> None:
        """`file` is appended to, by nobody else."""
        self._file = file
        self._refused = refused

    def write(self, line: bytes) -> None:
        """All of it, or nothing; then `refused` is told."""
        written = 0
        try:
            with writing(Path(str(self._file.name))):
                while written < len(line):
                    written += self._file.write(line[written:])
        except DiskRefused as error:
            if written:
                self._file.truncate(os.fstat(self._file.fileno()).st_size - written)
            self._refused(error)

    def flush(self) -> None:
        """Nothing is kept back."""


def configure(folder: RunFolder, process: str, level: str = "info", refused: Refused | None = None) -> None:
    """Send this process's log to its file. `refused` is told when a line cannot be written; without it the process ends."""
    folder.logs.mkdir(parents=True, exist_ok=True)
    file = (folder.logs / f"{process}.jsonl").open("ab", buffering=0)
    stream = LogFile(file, refused or partial(end_at_once, folder, process))
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

"""Structured logs: JSON lines in `runs/NAME/logs/PROCESS.jsonl`, one event a line.

An event is a constant `noun.past_verb`; its data stands in keys with units.
"""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import structlog

from configs.run_folder import RunFolder


def configure(folder: RunFolder, process: str, level: str = "info") -> None:
    """Send this process's log to its file. Lines are flushed as they are written: a kill loses none."""
    folder.logs.mkdir(parents=True, exist_ok=True)
    stream = (folder.logs / f"{process}.jsonl").open("ab", buffering=0)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(serializer=_to_json),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.BytesLoggerFactory(stream),
        cache_logger_on_first_use=False,
    )
    structlog.contextvars.bind_contextvars(process=process)


def _to_json(entry: Any, **_: Any) -> bytes:
    return msgspec.json.encode(entry, enc_hook=str)

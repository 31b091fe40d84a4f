"""Delivery sends the lines of metrics.jsonl to one sink, and continues where an earlier process stopped.

Consumes complete lines of the file; waits for more lines until the run has ended. The file is the only channel from
the run, so a slow backend delays nothing but its own records.
"""

import os
import secrets
import select
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TypeVar

from asterism.actors.sinks.contract import BackendRun, MetricSink
from asterism.actors.sinks.delivery_ledger import DeliveryLedger, NumberedLine
from asterism.actors.sinks.metric_records import build_record
from asterism.configs.atomic_write import write_atomically
from asterism.configs.file_manifest import check_file
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.run_config import RunConfig

POLL_S = 0.5  # seconds between two reads of metrics.jsonl
MAX_BATCH = 100  # limit of records per write
IDENTITY = "identity"  # file with the random id of the run in the backends

Item = TypeVar("Item")
# This function waits up to POLL_S, and returns whether the file gets no further lines.
WaitForLines = Callable[[], bool]


class MetricLines:
    """The complete lines of metrics.jsonl, in order. A restarted head may remove only an incomplete line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read_new(self) -> list[bytes]:
        """Return the complete lines since the last call, without their line breaks."""
        if not self._path.exists() or self._path.stat().st_size <= self._offset:
            return []
        check_file(self._path)
        with self._path.open("rb") as file:
            file.seek(self._offset)
            content = file.read()
        complete = content[: content.rfind(b"\n") + 1]
        self._offset += len(complete)
        return complete.splitlines()


def deliver(folder: RunFolder, name: str, open_sink: Callable[[], MetricSink], wait: WaitForLines) -> None:
    """Deliver all lines. Raises UnusableInput if another process delivers, and errors of the sink."""
    lines = MetricLines(folder.metrics)
    with DeliveryLedger(get_ledger_path(folder, name)) as ledger:
        sink = open_sink()
        present = lines.read_new()
        _repeat_undelivered(sink, ledger, present)
        _deliver_unsent(sink, ledger, present)
        has_ended = False
        while not has_ended:
            has_ended = wait()
            _deliver_unsent(sink, ledger, lines.read_new())
        sink.close()
        ledger.mark_delivered()


def _repeat_undelivered(sink: MetricSink, ledger: DeliveryLedger, present: Sequence[bytes]) -> None:
    """Continue an earlier process: replace the steps that a resumed run repeats, and send unconfirmed lines again."""
    if (step := ledger.find_repeated_step(present)) is not None:
        sink.replace_from(step)  # before the ledger's entry, so that the process after a kill repeats the replacement
        ledger.enter_replaced(step)
    for batch in _split(ledger.select_undelivered(present)):
        _write(sink, batch)


def _deliver_unsent(sink: MetricSink, ledger: DeliveryLedger, lines: Sequence[bytes]) -> None:
    for batch in _split(lines):
        _write(sink, ledger.enter_unsent(batch))
        if sink.is_durable:
            ledger.mark_delivered()


def _write(sink: MetricSink, lines: Sequence[NumberedLine]) -> None:
    if lines:
        sink.write([build_record(each.number, each.line) for each in lines])


def _split(items: Sequence[Item]) -> Iterator[Sequence[Item]]:
    for start in range(0, len(items), MAX_BATCH):
        yield items[start : start + MAX_BATCH]


def make_wait_until_terminated() -> WaitForLines:
    """Make a wait for SIGTERM, which means that the file is complete."""
    reader, writer = os.pipe()

    def on_termination(_: int, __: FrameType | None) -> None:
        os.write(writer, b".")

    signal.signal(signal.SIGTERM, on_termination)
    return lambda: bool(select.select([reader], [], [], POLL_S)[0])


def make_identity(folder: RunFolder) -> None:
    """Write the run's id before the sinks start, so that all of them use the same one."""
    folder.sinks.mkdir(exist_ok=True)
    if not (identity := folder.sinks / IDENTITY).exists():
        write_atomically(identity, secrets.token_hex(4).encode())


def load_backend_run(run: RunConfig, folder: RunFolder) -> BackendRun:
    return BackendRun((folder.sinks / IDENTITY).read_text(), run, folder)


def count_undelivered(folder: RunFolder, name: str) -> tuple[int, int]:
    """Return (undelivered records, all records)."""
    lines = MetricLines(folder.metrics).read_new()
    return DeliveryLedger(get_ledger_path(folder, name)).count_undelivered(lines), len(lines)


def get_ledger_path(folder: RunFolder, name: str) -> Path:
    return folder.sinks / f"{name}.jsonl"

"""The head: arbiter, group buffer, recipe and recorder in one process, and the metrics file."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence, Set
from pathlib import Path

import msgspec
import structlog

from actors.deciding import Life, decide_until_shutdown
from actors.wiring import HEAD, deciders_of
from analysis.utilization.step_observer import StepObserver
from bus.event_reading import envelope_of, read_events
from bus.joining import Join
from bus.messages import AnyMessage, BufferCursor, MetricsRecorded, RunStarted, StepCollected
from configs.disk import write_whole, writing
from configs.errors import UnusableInput
from configs.run_folder import RunFolder
from configs.schema import Run
from engine.snapshots import steps_saved


class NotResumable(UnusableInput):
    """What a resumed run needs is not there."""


async def run_head(run: Run, folder: RunFolder, step: int, life: Life, join: Join) -> None:
    """Decide until Shutdown. `step` is that of the checkpoint from which the run went on; 0 is the beginning."""
    deciders = deciders_of(HEAD, run, folder)
    cursor = find_cursor(folder.events / f"{HEAD}.sqlite", step)
    metrics = MetricsFile(folder.metrics)
    observer = StepObserver(structlog.get_logger().info)
    structlog.get_logger().info("head.started", step=step, position=cursor.position)
    started = RunStarted(step, cursor)
    await decide_until_shutdown(life, run, folder, deciders, started, {"metrics": metrics.write}, observer, join)


def step_to_resume(folder: RunFolder) -> int | None:
    """The newest step of which both the checkpoint and the log's record are there; None if there is nothing to resume.

    A kill between the two leaves a checkpoint that the log does not know yet: then the one before it counts. So it does
    where the step has no line in the metrics yet, unless there is none before it but the beginning.
    """
    known = {0, *_cursors(folder.events / f"{HEAD}.sqlite")}
    return newest_whole(known.intersection(steps_saved(folder.checkpoints)), steps_written(folder.metrics))


def newest_whole(steps: Set[int], written: Set[int]) -> int | None:
    return max(steps & written, default=None) or max(steps, default=None)


def find_cursor(log: Path, step: int) -> BufferCursor:
    """Where the group buffer stood at the end of `step`, by the log. Raises NotResumable."""
    if step == 0:
        return BufferCursor()
    cursor = _cursors(log).get(step)
    if cursor is None:
        raise NotResumable(f"{log}: no record of step {step}; a run can only be resumed if log.events is on")
    return cursor


def _cursors(log: Path) -> dict[int, BufferCursor]:
    """By step; of a step that was done twice, as after a resume, the later one."""
    messages = (
        [envelope_of(log, event).message for event, _ in read_events(log, kinds=["StepCollected"])]
        if log.exists()
        else []
    )
    return {message.step: message.cursor for message in messages if isinstance(message, StepCollected)}


def steps_written(metrics: Path) -> set[int]:
    """That have their line."""
    lines = metrics.read_bytes().splitlines(keepends=True) if metrics.exists() else []
    subjects = (_subject(line) for line in lines if line.endswith(b"\n"))
    return {step for kind, step, _ in subjects if kind == "step"}


class MetricsFile:
    """One JSON line for each step and each evaluation, however often it is told of it. Writing runs off the event loop."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.touch()
        self._written = {_subject(line) for line in self._lines()}

    def keep_up_to(self, step: int) -> None:
        """Drop what a former run wrote about steps after the checkpoint that this one begins at."""
        kept = [line for line in self._lines() if _subject(line)[1] <= step] if step else []
        self._rewrite(kept)
        self._written = {_subject(line) for line in kept}

    async def write(self, message: AnyMessage) -> None:
        if isinstance(message, MetricsRecorded):
            label = {"label": message.label} if message.label else {}
            line = msgspec.json.encode({"kind": message.kind, "step": message.step, **label, **message.values})
            if _subject(line) not in self._written:
                self._written.add(_subject(line))
                await asyncio.to_thread(self._append, line)

    def _lines(self) -> list[bytes]:
        """Those that are whole: of the last one a kill may have left a part."""
        lines = self._path.read_bytes().splitlines(keepends=True)
        whole = [line for line in lines if line.endswith(b"\n")]
        if len(whole) < len(lines):
            self._rewrite(whole)
        return whole

    def _rewrite(self, lines: Sequence[bytes]) -> None:
        write_whole(self._path, b"".join(lines))

    def _append(self, line: bytes) -> None:
        with writing(self._path), self._path.open("ab") as file:
            file.write(line + b"\n")


def _subject(line: bytes) -> tuple[str, int, str]:
    """What the line is about: its kind, step and label."""
    values = msgspec.json.decode(line)
    return values["kind"], values["step"], values.get("label", "")

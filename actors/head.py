"""The head: arbiter, group buffer, recipe and recorder in one process, and the metrics file."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import structlog

from actors.clock import steady_clock
from actors.decider_loop import DeciderLoop
from actors.wiring import HEAD, deciders_of
from analysis.utilization.step_observer import StepObserver
from bus.codec import decode
from bus.event_log import EventLog
from bus.event_reading import read_events
from bus.messages import AnyMessage, BufferCursor, MetricsRecorded, RunStarted, StepCollected
from bus.zeromq import zmq_bus
from configs.errors import UnusableInput
from configs.run_folder import RunFolder
from configs.schema import Run
from engine.snapshots import steps_saved


class NotResumable(UnusableInput):
    """What a resumed run needs is not there."""


async def run_head(run: Run, folder: RunFolder, step: int) -> None:
    """Decide until Shutdown. `step` is that of the checkpoint from which the learner goes on; 0 is the beginning."""
    deciders = deciders_of(HEAD, run, folder)
    cursor = find_cursor(folder.events / f"{HEAD}.sqlite", step)
    _keep_metrics_up_to(folder.metrics, step)
    log = EventLog(folder.events / f"{HEAD}.sqlite") if run.log.events else None
    bus = zmq_bus(HEAD, folder.sockets, run.bus.queue_messages)
    started = RunStarted(step, cursor)
    for actor in deciders:  # in the inbox before anything that arrives from outside
        await bus.send(f"{HEAD}/{actor}", started)
    metrics = MetricsFile(folder.metrics)
    structlog.get_logger().info("head.started", step=step, position=cursor.position)
    try:
        observer = StepObserver(structlog.get_logger().info)
        await DeciderLoop(bus, log, deciders, {"metrics": metrics.write}, steady_clock(), observer).run()
    finally:
        await bus.close()
        if log is not None:
            log.close()


def step_to_resume(folder: RunFolder) -> int | None:
    """The newest step of which both the checkpoint and the log's record are there; None if there is nothing to resume.

    A kill between the two leaves a checkpoint that the log does not know yet: then the one before it counts.
    """
    known = {0, *_cursors(folder.events / f"{HEAD}.sqlite")}
    return max(known.intersection(steps_saved(folder.checkpoints)), default=None)


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
        [decode(event.frame).message for event, _ in read_events(log, kinds=["StepCollected"])] if log.exists() else []
    )
    return {message.step: message.cursor for message in messages if isinstance(message, StepCollected)}


def _keep_metrics_up_to(path: Path, step: int) -> None:
    """Drop what a former life of the run wrote about steps after its last checkpoint. The file is there from then on."""
    path.touch()
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if line.endswith(b"\n") and msgspec.json.decode(line)["step"] <= step]
    rewritten = path.with_suffix(".rewritten")
    rewritten.write_bytes(b"".join(kept if step else []))
    rewritten.replace(path)


class MetricsFile:
    """Appends one JSON line for each step and each evaluation; writing runs off the event loop."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def write(self, message: AnyMessage) -> None:
        if isinstance(message, MetricsRecorded):
            label = {"label": message.label} if message.label else {}
            line = msgspec.json.encode({"kind": message.kind, "step": message.step, **label, **message.values})
            await asyncio.to_thread(self._append, line)

    def _append(self, line: bytes) -> None:
        with self._path.open("ab") as file:
            file.write(line + b"\n")

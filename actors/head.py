"""The head: arbiter, group buffer, recipe and recorder in one process, and the metrics file."""

from __future__ import annotations

import structlog

from actors.metrics_file import MetricsFile
from actors.runtime.decider_process import ProcessIncarnation, decide_until_shutdown
from actors.runtime.resume_point import find_cursor
from actors.runtime.wiring import build_deciders
from bus.addresses import HEAD
from bus.bus import BusFactory
from bus.messages import RunStarted
from configs.run_folder import RunFolder
from configs.schema import RunConfig
from policies.observers.step_observer import StepObserver


async def run_head(
    run: RunConfig, folder: RunFolder, step: int, incarnation: ProcessIncarnation, open_bus: BusFactory
) -> None:
    """Decide until Shutdown. `step` is the checkpoint's step that the run resumes from; 0 is the beginning."""
    deciders = build_deciders(HEAD, run, folder)
    cursor = find_cursor(folder.events / f"{HEAD}.sqlite", step)
    metrics = MetricsFile(folder.metrics)
    logger = structlog.get_logger()
    logger.info("head.started", step=step, position=cursor.position)
    await decide_until_shutdown(
        *(incarnation, run, folder, deciders, RunStarted(step, cursor)),
        *({"metrics": metrics.write}, StepObserver(logger.info), open_bus),
    )

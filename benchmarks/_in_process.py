"""A whole run in one process: the same actors as over processes, on one event loop and the in-process bus.

    head, rollout: decide on the loop     generator, learner: one thread each     executor: fork servers     launcher: below

Messages are encoded, numbered and acknowledged as over ZeroMQ; no socket carries them. All threads share one
interpreter's lock. `python -m benchmarks._in_process RUN_FOLDER` takes all steps of the run whose configuration is there.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import structlog
import uvloop

from actors.deciding import Life
from actors.process import work_of
from actors.wiring import HEAD, LAUNCHER, LEARNER, ROLLOUT, executors, generators
from bus.in_process import Hub
from bus.joining import in_process
from bus.messages import ExecutorJoined, RunFinished, Shutdown
from bus.structured_log import configure
from bus.transport import Bus
from configs.load import load_resolved
from configs.run_folder import RunFolder
from configs.schema import Run
from engine import learner
from engine.distributed import Ranks


async def whole_run(run: Run, folder: RunFolder) -> None:
    """From the beginning to the end of all actors. What one of them raises ends them all, in an ExceptionGroup."""
    join = in_process(run, Hub())
    bus, works = join(LAUNCHER, 0), dict[str, asyncio.Task[None]]()
    async with asyncio.TaskGroup() as group:
        for name in (HEAD, ROLLOUT, *generators(run), *executors(run)):
            works[name] = group.create_task(work_of(Life(name, 0), run, folder, 0, join), name=name)
        learning = learner.lead(run, folder, Ranks(), learner.Life(1, 0, 0), join)
        works[LEARNER] = group.create_task(learning, name=LEARNER)
        await _until_finished(bus)
        others = works.keys() - {HEAD}
        for name in others:
            await bus.send(name, Shutdown())
        await asyncio.wait([works[name] for name in others])
        await bus.send(HEAD, Shutdown())
    await bus.close()


async def _until_finished(bus: Bus) -> None:
    """The launcher's part in a run in which nobody dies."""
    while not isinstance(message := (await bus.receive()).message, RunFinished):
        if isinstance(message, ExecutorJoined):
            await bus.send(ROLLOUT, message)


def main() -> None:
    folder = RunFolder(Path(sys.argv[1]))
    run = load_resolved(folder.config)
    configure(folder, "all", run.log.level)
    structlog.get_logger().info("run.started", step=0, seed=run.seed)
    uvloop.run(whole_run(run, folder))


if __name__ == "__main__":
    main()

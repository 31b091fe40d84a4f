"""Runs the actors of a run in one process, on one event loop and the in-process bus.

    head, rollout: decide on the loop     generator, learner: one thread each
    executor: fork servers                launcher: replaced by a function

The bus encodes, numbers and acknowledges messages as over ZeroMQ, without sockets. All threads
share one interpreter lock.

`python -m benchmarks.support.in_process_run RUN_FOLDER` runs all steps of the folder's configuration.
"""

import asyncio
import sys
from pathlib import Path

import structlog
import uvloop

from asterism.actors.process import build_process_coroutine
from asterism.actors.runtime.decider_process import ProcessIncarnation
from asterism.actors.runtime.wiring import list_executors, list_generators
from asterism.bus.addresses import HEAD, LAUNCHER, LEARNER, ROLLOUT
from asterism.bus.bus import Bus
from asterism.bus.messages import ExecutorJoined, RunFinished, Shutdown
from asterism.bus.process.structured_log import configure_logging
from asterism.bus.transport.in_process import Hub, make_in_process_bus_factory
from asterism.configs.load import load_run
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.run_config import RunConfig
from asterism.engine.learner import learner
from asterism.engine.learner.distributed import RankGroup


async def run_in_one_process(run: RunConfig, folder: RunFolder) -> None:
    """Run all actors until they end. If an actor fails, cancel the other actors and raise ExceptionGroup."""
    join = make_in_process_bus_factory(run, Hub())
    bus, works = join(LAUNCHER, 0), dict[str, asyncio.Task[None]]()
    async with asyncio.TaskGroup() as group:
        for name in (HEAD, ROLLOUT, *list_generators(run), *list_executors(run)):
            works[name] = group.create_task(
                build_process_coroutine(ProcessIncarnation(name, 0), run, folder, 0, join), name=name
            )
        learning = learner.run_leader(run, folder, RankGroup(), learner.LearnerIncarnation(1, 0, 0), join)
        works[LEARNER] = group.create_task(learning, name=LEARNER)
        await _wait_until_finished(bus)
        others = works.keys() - {HEAD}
        for name in others:
            await bus.send(name, Shutdown())
        await asyncio.wait([works[name] for name in others])
        await bus.send(HEAD, Shutdown())
    await bus.close()


async def _wait_until_finished(bus: Bus) -> None:
    """Wait as the launcher does in a run without failures."""
    while not isinstance(message := (await bus.receive()).message, RunFinished):
        if isinstance(message, ExecutorJoined):
            await bus.send(ROLLOUT, message)


def main() -> None:
    folder = RunFolder(Path(sys.argv[1]))
    run = load_run(folder.config)
    configure_logging(folder, "all", run.log.level)
    structlog.get_logger().info("run.started", step=0, seed=run.seed)
    uvloop.run(run_in_one_process(run, folder))


if __name__ == "__main__":
    main()

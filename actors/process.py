"""`python -m actors.process NAME --run-folder FOLDER`: one process of a run, as the launcher starts it.

`--step` is where the run goes on, for processes that decide; `--life` counts an executor's starts. The learner is
another program (engine.learner), since torchrun starts it.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import structlog
import uvloop
from msgspec.structs import replace

from actors.clock import steady_clock
from actors.decider_loop import DeciderLoop
from actors.head import run_head
from actors.loop_lag import measure_loop_lag
from actors.wiring import HEAD, LAUNCHER, deciders_of
from analysis.summary import isolation_in_force
from analysis.utilization.trajectory_observer import TrajectoryObserver
from bus.event_log import EventLog, EventLogFailure
from bus.messages import BufferCursor, RunStarted
from bus.structured_log import configure
from bus.zeromq import zmq_bus
from configs.errors import UNUSABLE, UnusableInput
from configs.load import load_resolved
from configs.run_folder import RunFolder
from configs.schema import Run, Sandbox
from engine.contract import Capacity
from sandbox.contract import SandboxFailure

COUNTS_EVERY_S = 0.1  # between two lines of how many trajectories wait for what
NO_POLICY = -1  # version of the weights that an engine starts with: nothing is generated before the learner's arrive


async def run_rollout(name: str, run: Run, folder: RunFolder, step: int) -> None:
    deciders = deciders_of(name, run, folder)
    log = EventLog(folder.events / f"{name}.sqlite") if run.log.events else None
    bus = zmq_bus(name, folder.sockets, run.bus.queue_messages)
    await bus.send(name, RunStarted(step, BufferCursor()))  # in the inbox before anything that arrives from outside
    observer = TrajectoryObserver(structlog.get_logger().info)
    counting = asyncio.create_task(_say_counts(observer))
    try:
        await DeciderLoop(bus, log, deciders, {}, steady_clock(), observer).run()
    finally:
        counting.cancel()
        await bus.close()
        if log is not None:
            log.close()


async def _say_counts(observer: TrajectoryObserver) -> None:
    """Runs until cancelled."""
    try:
        while True:
            observer.say_counts()
            await asyncio.sleep(COUNTS_EVERY_S)
    finally:
        observer.say_counts()


async def run_generator(name: str, run: Run, folder: RunFolder) -> None:
    import torch

    from actors.generator import Generator  # imports torch, which the other processes do without
    from engine.devices import device_of
    from engine.embedded import EmbeddedEngine

    engine = EmbeddedEngine(
        folder.expand(run.model.checkpoint),
        Capacity(run.engine.kv_tokens, run.engine.page_tokens, run.dialogue.sequence_tokens),
        threads=run.engine.threads,
        prefill_tokens=run.engine.prefill_tokens,
        max_running=run.engine.max_running,
        dtype=getattr(torch, run.engine.dtype),
        device=device_of(run.engine.device, int(name.rpartition("-")[2])),
        cuda_graphs=run.engine.cuda_graphs,
        version=NO_POLICY,
    )
    bus = zmq_bus(name, folder.sockets, run.bus.queue_messages)
    try:
        await Generator(name, bus, engine, arbiter=f"{HEAD}/arbiter").run()
    finally:
        await bus.close()


async def run_executor(name: str, run: Run, folder: RunFolder, life: int) -> None:
    from actors.executor import Executor
    from actors.executor_load import report_load
    from sandbox.choice import sandbox_of

    bus = zmq_bus(name, folder.sockets, run.bus.queue_messages, session=life)
    sandbox = sandbox_of(_as_before(run.sandbox, folder, life), run.seed, run.name)
    executor = Executor(
        bus,
        sandbox,
        address=f"{name}/{life}",
        slots=run.sandbox.fork_servers,
        max_calls=run.sandbox.max_queued_calls,
        launcher=LAUNCHER,
    )
    reporting = asyncio.create_task(report_load(f"{name}/{life}", run.sandbox.fork_servers, sandbox.load))
    try:
        await executor.run()
    finally:
        reporting.cancel()
        await bus.close()


def _as_before(config: Sandbox, folder: RunFolder, life: int) -> Sandbox:
    """Once "auto" has chosen, an executor that starts again gets the same or none: isolation never weakens midway."""
    before = isolation_in_force(folder) if life > 1 and config.backend == "auto" else None
    return config if before is None else replace(config, backend=before["backend"])


def work_of(name: str, run: Run, folder: RunFolder, step: int, life: int) -> Callable[[], Awaitable[None]]:
    if name == HEAD:
        return lambda: run_head(run, folder, step)
    if name.startswith("executor-"):
        return lambda: run_executor(name, run, folder, life)
    if name.startswith("generator-"):
        return lambda: run_generator(name, run, folder)
    return lambda: run_rollout(name, run, folder, step)


async def live(work: Callable[[], Awaitable[None]]) -> None:
    gauge = asyncio.create_task(measure_loop_lag())
    try:
        await work()
    finally:
        gauge.cancel()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--run-folder", type=Path, required=True)
    parser.add_argument("--step", type=int, default=0)
    parser.add_argument("--life", type=int, default=1)
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher ends its processes, in order
    folder = RunFolder(arguments.run_folder)
    try:
        run = load_resolved(folder.config)
        configure(folder, arguments.name, run.log.level)
        uvloop.run(live(work_of(arguments.name, run, folder, arguments.step, arguments.life)))
    except (UnusableInput, EventLogFailure, SandboxFailure) as error:
        structlog.get_logger().exception("process.failed")
        sys.stderr.write(f"{error}\n")
        return UNUSABLE
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`python -m actors.process NAME --run-folder FOLDER`: one process of a run, as the launcher starts it.

`--step` is where the run goes on, for processes that decide; `--life` counts the process's starts, and `--session` is what
its links go by (bus.link). The learner is another program (engine.learner), since torchrun starts it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import threading
from collections.abc import AsyncGenerator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, assert_never

import structlog
import uvloop
from msgspec.structs import replace

from actors.deciding import Life, decide_until_shutdown
from actors.head import run_head
from actors.losing_engine import Loss
from actors.wiring import HEAD, LAUNCHER, WEIGHTS, deciders_of, index_of
from analysis.summary import isolation_of
from analysis.utilization.trajectory_observer import TrajectoryObserver
from bus.book import network_of
from bus.event_log import EventLogFailure
from bus.heartbeat import beating
from bus.joining import Join, over_zeromq
from bus.last_words import end_with
from bus.messages import BufferCursor, RunStarted
from bus.structured_log import configure
from bus.transport import Bus
from configs.errors import UnusableInput
from configs.load import load_resolved
from configs.run_folder import RunFolder
from configs.schema import Run, Sandbox
from engine.contract import Engine, EngineFailure
from sandbox.contract import SandboxFailure

if TYPE_CHECKING:
    from actors.generator import Nearby

COUNTS_EVERY_S = 0.1  # between two lines of how many trajectories wait for what
NO_POLICY = -1  # version of the weights that an engine starts with: nothing is generated before the learner's arrive


async def run_rollout(life: Life, run: Run, folder: RunFolder, step: int, join: Join) -> None:
    deciders = deciders_of(life.process, run, folder)
    observer = TrajectoryObserver(structlog.get_logger().info)
    started = RunStarted(step, BufferCursor())
    await decide_until_shutdown(life, run, folder, deciders, started, {}, observer, join, lambda: _say_counts(observer))


async def _say_counts(observer: TrajectoryObserver) -> None:
    """Runs until cancelled."""
    try:
        while True:
            observer.say_counts()
            await asyncio.sleep(COUNTS_EVERY_S)
    finally:
        observer.say_counts()


async def run_generator(life: Life, run: Run, folder: RunFolder, join: Join) -> None:
    from actors.generator import Generator

    loss = Loss()
    engine = _engine_of(life, run, folder, loss)
    async with _on_the_bus(life, run, folder, join) as bus:
        arbiter, recipe = f"{HEAD}/arbiter", f"{HEAD}/recipe"
        nearby = _nearby(folder)
        generator = Generator(life.process, bus, engine, arbiter, life=life.number, recipe=recipe, nearby=nearby)
        with loss.raised():
            await generator.run()


def _engine_of(life: Life, run: Run, folder: RunFolder, loss: Loss) -> Engine:
    checkpoint = folder.expand(run.model.checkpoint)
    match run.engine.kind:
        case "embedded":
            from actors.embedded_engine import embedded_engine

            kv_tokens, index = run.engine.kv_tokens, index_of(life.process)
            return embedded_engine(run, checkpoint, kv_tokens=kv_tokens, index=index, version=NO_POLICY)
        case "sglang":
            from actors.sglang_engine import sglang_engine

            return sglang_engine(
                run, checkpoint, folder, life.process, version=NO_POLICY, lost=loss.note, life=life.number
            )
        case _:
            assert_never(run.engine.kind)


def _nearby(folder: RunFolder) -> Nearby | None:
    """How weights come to this node, if they are published on another one."""
    network = network_of(folder.sockets)
    weights = None if network is None else network.entry(WEIGHTS)
    if network is None or weights is None or network.is_near(weights):
        return None
    from engine.weight_fetching import WeightsFetcher

    return WeightsFetcher(folder.shared_memory, weights.address.host, weights.address.port, network.key).nearby


async def run_executor(life: Life, run: Run, folder: RunFolder, join: Join) -> None:
    from actors.executor import Executor
    from actors.executor_load import report_load
    from sandbox.choice import sandbox_of

    address = f"{life.process}/{life.number}"
    async with _on_the_bus(life, run, folder, join) as bus:
        sandbox = sandbox_of(_as_before(run.sandbox, folder, life), run.seed, run.name)
        executor = Executor(
            bus,
            sandbox,
            address=address,
            slots=run.sandbox.fork_servers,
            max_calls=run.sandbox.max_queued_calls,
            launcher=LAUNCHER,
            strict=run.determinism == "strict",
        )
        reporting = asyncio.create_task(report_load(address, run.sandbox.fork_servers, sandbox.load))
        try:
            await executor.run()
        finally:
            reporting.cancel()


@asynccontextmanager
async def _on_the_bus(life: Life, run: Run, folder: RunFolder, join: Join) -> AsyncGenerator[Bus]:
    bus = join(life.process, life.session)
    try:
        async with beating(life.process, life.number, run.supervision.heartbeat_s, folder.sockets, lambda: bus):
            yield bus
    finally:
        await bus.close()


def _as_before(config: Sandbox, folder: RunFolder, life: Life) -> Sandbox:
    """Once "auto" has chosen, an executor that starts again gets the same or none: isolation never weakens midway."""
    before = isolation_of(folder, life.process) if life.number > 1 and config.backend == "auto" else None
    return config if before is None else replace(config, backend=before["backend"])


def work_of(life: Life, run: Run, folder: RunFolder, step: int, join: Join) -> Coroutine[Any, Any, None]:
    if life.process == HEAD:
        return run_head(run, folder, step, life, join)
    if life.process.startswith("executor-"):
        return run_executor(life, run, folder, join)
    if life.process.startswith("generator-"):
        return run_generator(life, run, folder, join)
    return run_rollout(life, run, folder, step, join)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--run-folder", type=Path, required=True)
    parser.add_argument("--scratch", default="", help="as of configs.run_folder.RunFolder")
    parser.add_argument("--step", type=int, default=0)
    parser.add_argument("--life", type=int, default=1)
    parser.add_argument("--session", type=int, default=0)
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher ends its processes, in order
    folder = RunFolder(arguments.run_folder, arguments.scratch)
    try:
        run = load_resolved(folder.config)
        configure(folder, arguments.name, run.log.level)
        life = Life(arguments.name, arguments.session, arguments.life)
        uvloop.run(work_of(life, run, folder, arguments.step, over_zeromq(run, folder)))
    except (UnusableInput, EventLogFailure, SandboxFailure) as error:
        return end_with(folder, arguments.name, error)
    except EngineFailure as error:  # the next life has another engine
        sys.stderr.write(f"{error}\n")
        structlog.get_logger().error("engine.lost", cause=str(error))
        return 1
    return 0


def leave(code: int) -> NoReturn:
    """A thread that waits for the other side of a collective, which has gone, cannot be interrupted. Python's own end
    would abort the process then, with another exit code."""
    if any(thread.name.startswith("weights ") for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    leave(main())

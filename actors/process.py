"""`python -m asterism.actors.process NAME --run-folder FOLDER` is one process of a run, as the launcher starts it.

The learner is a separate program (asterism.engine.learner), since torchrun starts several ranks of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import AsyncGenerator, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
import structlog
import uvloop
from msgspec.structs import replace

from asterism.actors.engines.engine_gone import EngineGoneSignal
from asterism.actors.evaluation.head_evaluations import EvaluationMetrics, find_answered, recording_answers
from asterism.actors.metrics_file import MetricsFile
from asterism.actors.runtime.decider_process import ProcessIncarnation, decide_until_shutdown
from asterism.actors.runtime.resume_point import find_cursor, list_earlier_steps
from asterism.actors.runtime.wiring import build_deciders, build_live_head_deciders
from asterism.bus.addresses import ARBITER, HEAD, LAUNCHER, RECIPE, RECORDER, WEIGHT_SERVER, is_executor, is_generator
from asterism.bus.bus import Bus, BusFactory
from asterism.bus.event_log.writer import EventLogFailure
from asterism.bus.messages import BufferCursor, RunStarted
from asterism.bus.process.heartbeat import sending_heartbeats
from asterism.bus.process.process_main import make_process_parser, pausing_garbage_collector, run_process_main
from asterism.bus.process.structured_log import configure_logging
from asterism.bus.transport.address_book import load_network
from asterism.bus.transport.zeromq import make_zeromq_bus_factory
from asterism.configs.atomic_write import raising_disk_errors, write_atomically
from asterism.configs.load import load_run
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.machines import SandboxConfig
from asterism.configs.schema.run_config import RunConfig
from asterism.engine.contract import Engine, EngineFailure
from asterism.engine.data.task_inputs import read_task_descriptions
from asterism.engine.engine_code import EngineStart, load_engine_code
from asterism.engine.learner.checkpoints.best_checkpoint import BestCheckpointFile
from asterism.policies.evaluation_recipe import EVALUATED_VERSION
from asterism.policies.observers import StepObserver, TrajectoryObserver
from asterism.policies.rollout.rollout import Rollout
from asterism.sandbox.contract import Isolation, SandboxFailure
from asterism.tasks.prepare_program import PREPARE, prepare_run

if TYPE_CHECKING:
    from asterism.actors.engines.weight_loading import FetchToNode

COUNTS_INTERVAL_S = 0.1  # seconds between two log lines with the number of trajectories in each state
# An engine with this version generates nothing: it waits for the learner's weights.
NO_POLICY_VERSION = -1


async def run_head(
    incarnation: ProcessIncarnation, run: RunConfig, folder: RunFolder, step: int, open_bus: BusFactory
) -> None:
    """Run arbiter, group buffer, recipe, recorder and metrics file in one process."""
    deciders = build_live_head_deciders(run, folder)
    log = folder.events / f"{HEAD}.sqlite"
    cursor = find_cursor(log, step, run.rl.first_problem)
    metrics = MetricsFile(folder.metrics, BestCheckpointFile(run, folder.checkpoints))
    logger = structlog.get_logger()
    logger.info("head.started", step=step, position=cursor.position)
    earlier, answered = list_earlier_steps(log, run, step), find_answered(run, folder, incarnation.epoch)
    started = RunStarted(step, cursor, run.health, earlier, answered)
    with recording_answers(run, folder, StepObserver(logger.info)) as (answers, observer):
        services = {"metrics": EvaluationMetrics(run, folder, answers, metrics.write).write}
        await decide_until_shutdown(incarnation, run, folder, deciders, started, services, observer, open_bus)


async def run_rollout(
    incarnation: ProcessIncarnation, run: RunConfig, folder: RunFolder, step: int, open_bus: BusFactory
) -> None:
    deciders = build_deciders(incarnation.process, run, folder)
    rollout = deciders[incarnation.process]
    assert isinstance(rollout, Rollout)
    observer = TrajectoryObserver(structlog.get_logger().info, rollout)
    started = RunStarted(step, BufferCursor())
    await decide_until_shutdown(
        incarnation, run, folder, deciders, started, {}, observer, open_bus, lambda: _report_counts(observer)
    )


async def _report_counts(observer: TrajectoryObserver) -> None:
    try:
        while True:
            observer.write_counts()
            await asyncio.sleep(COUNTS_INTERVAL_S)
    finally:
        observer.write_counts()


async def run_generator(
    incarnation: ProcessIncarnation, run: RunConfig, folder: RunFolder, open_bus: BusFactory
) -> None:
    from asterism.actors.engines.weight_loading import WeightLoader
    from asterism.actors.generator import Generator

    engine_gone = EngineGoneSignal()
    engine = _build_engine(incarnation, run, folder, engine_gone)
    async with _connected_bus(incarnation, run, folder, open_bus) as bus:
        fetch = _build_fetch_to_node(run, folder)
        generator = Generator(
            incarnation.process,
            bus,
            engine,
            ARBITER,
            incarnation=incarnation.number,
            recipe="" if run.evaluation.only else RECIPE,
            recorder=RECORDER,
            loader=WeightLoader(engine, fetch, run.engine.load_timeout_s),
            engine_gone=engine_gone,
        )
        with engine_gone.raising_engine_failure():
            await generator.run()


def _build_engine(
    incarnation: ProcessIncarnation, run: RunConfig, folder: RunFolder, engine_gone: EngineGoneSignal
) -> Engine:
    version = EVALUATED_VERSION if run.evaluation.only else NO_POLICY_VERSION
    start = EngineStart(run, folder, incarnation.process, version, engine_gone.cancel_task, incarnation.number)
    with pausing_garbage_collector():  # pauses while torch is imported
        return load_engine_code(run).build(start)


def _build_fetch_to_node(run: RunConfig, folder: RunFolder) -> FetchToNode | None:
    """Build the function that fetches published weights to this node, or None if this node publishes them."""
    network = load_network(folder.sockets)
    weights = None if network is None else network.find_entry(WEIGHT_SERVER)
    if network is None or weights is None or network.is_local(weights):
        return None
    from asterism.engine.weight_transfer.weight_client import WeightsFetcher

    address, has_base = weights.address, run.learner.lora.publish == "adapters"
    return WeightsFetcher(folder.shared_memory, address.host, address.port, network.key, has_base=has_base).fetch


async def run_executor(
    incarnation: ProcessIncarnation, run: RunConfig, folder: RunFolder, open_bus: BusFactory
) -> None:
    from asterism.actors.executor import Executor, report_load
    from asterism.sandbox.hosts.docker.docker_host import remove_stale_containers
    from asterism.sandbox.select_backend import make_sandbox
    from asterism.tasks.hosting.task_services import build_task_services

    address = f"{incarnation.process}/{incarnation.number}"
    async with _connected_bus(incarnation, run, folder, open_bus) as bus:
        path = folder.get_isolation_path(incarnation.process)
        config = pin_backend(run.sandbox, path, incarnation.number)
        if config.backend == "process":  # the other backends remove stale containers at their start
            with contextlib.suppress(SandboxFailure):
                await remove_stale_containers()
        sandbox = make_sandbox(config, run.seed, run.name, run.acceptance)
        executor = Executor(
            bus,
            sandbox,
            address=address,
            slots=run.sandbox.fork_servers,
            max_calls=run.sandbox.max_queued_calls,
            launcher=LAUNCHER,
            strict=run.determinism == "strict",
            on_isolated=partial(record_isolation, path) if config.backend == "auto" else None,
            tasks=build_task_services(run, folder, read_task_descriptions(folder), sandbox),
        )
        reporting = asyncio.create_task(report_load(address, run.sandbox.fork_servers, sandbox.get_load))
        try:
            await executor.run()
        finally:
            reporting.cancel()


@asynccontextmanager
async def _connected_bus(
    incarnation: ProcessIncarnation, run: RunConfig, folder: RunFolder, open_bus: BusFactory
) -> AsyncGenerator[Bus]:
    bus = open_bus(incarnation.process, incarnation.epoch)
    try:
        async with sending_heartbeats(
            incarnation.process, incarnation.number, run.supervision.heartbeat_s, folder.sockets, lambda: bus
        ):
            yield bus
    finally:
        await bus.close()


def pin_backend(config: SandboxConfig, isolation_path: Path, incarnation: int) -> SandboxConfig:
    """Keep the backend that the first incarnation's "auto" chose, so that a restart never weakens the isolation."""
    if config.backend != "auto":
        return config
    if incarnation == 1:
        isolation_path.unlink(missing_ok=True)  # removes the file of an earlier launch
    if not isolation_path.exists():
        return config
    isolation = msgspec.json.decode(isolation_path.read_bytes(), type=Isolation)
    return replace(config, backend=isolation.backend)


def record_isolation(isolation_path: Path, isolation: Isolation) -> None:
    """Write the isolation. Raises DiskError."""
    with raising_disk_errors(isolation_path):
        isolation_path.parent.mkdir(exist_ok=True)
    write_atomically(isolation_path, msgspec.json.encode(isolation))


def build_process_coroutine(
    incarnation: ProcessIncarnation, run: RunConfig, folder: RunFolder, step: int, open_bus: BusFactory
) -> Coroutine[Any, Any, None]:
    if incarnation.process == HEAD:
        return run_head(incarnation, run, folder, step, open_bus)
    if is_executor(incarnation.process):
        return run_executor(incarnation, run, folder, open_bus)
    if is_generator(incarnation.process):
        return run_generator(incarnation, run, folder, open_bus)
    return run_rollout(incarnation, run, folder, step, open_bus)


def main() -> int:
    parser = make_process_parser("asterism.actors.process", "Runs one process of a run, as the launcher starts it.")
    parser.add_argument("name", help="name of the process")
    parser.add_argument("--step", type=int, default=0, help="step that the run resumes from, for deciding processes")
    arguments = parser.parse_args()
    incarnation = ProcessIncarnation(arguments.name, arguments.epoch, arguments.incarnation)

    def run_process(folder: RunFolder) -> None:
        run = load_run(folder.config)
        if incarnation.process == PREPARE:
            prepare_run(run, folder)
            return
        configure_logging(folder, incarnation.process, run.log.level)
        open_bus = make_zeromq_bus_factory(run, folder)
        uvloop.run(build_process_coroutine(incarnation, run, folder, arguments.step, open_bus))

    try:
        return run_process_main(
            incarnation.process, arguments, run_process, (EventLogFailure, SandboxFailure), (EngineFailure,)
        )
    except EngineFailure as error:  # the next incarnation starts a new engine
        sys.stderr.write(f"{error}\n")
        structlog.get_logger().error("engine.lost", cause=str(error))
        return 1


def exit_process(code: int) -> NoReturn:
    """Exit although a thread may be blocked in a collective that lost its peer.

    Python's own exit would abort the process then, with another exit code.
    """
    if any(thread.name.startswith("weights ") for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    exit_process(main())

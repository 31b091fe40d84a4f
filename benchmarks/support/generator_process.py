"""`python -m benchmarks.support.generator_process SETUP`: a generator with planned turn lengths.

The generator runs on a bus, as in a run. At Shutdown, the process prints its engine's counts as
one JSON line and exits.
"""

import logging
import sys
from pathlib import Path

import msgspec
import structlog
import torch
import uvloop

from asterism.actors.generator import Generator
from asterism.analysis.simulation.workload import WorkloadShape, draw_workload
from asterism.bus.transport.zeromq import open_zmq_bus
from asterism.configs.schema.machines import BusConfig
from asterism.engine.contract import Capacity
from benchmarks.support.planned_lengths import PlannedEngine


class EngineSetup(msgspec.Struct, frozen=True):
    """The setup of one engine process, which its command line has as JSON."""

    name: str
    arbiter: str
    folder: str  # folder of the sockets
    checkpoint: str
    capacity: Capacity
    threads: int
    shape: WorkloadShape  # shape of the workload
    seed: int


async def run_engine(setup: EngineSetup) -> None:
    plans = {plan.trajectory_id: plan for plan in draw_workload(setup.shape, setup.seed).plans}
    engine = PlannedEngine(setup.checkpoint, setup.capacity, threads=setup.threads, plans=plans)
    bus = open_zmq_bus(setup.name, Path(setup.folder), BusConfig().queue_messages)
    try:
        await Generator(setup.name, bus, engine, setup.arbiter).run()
    finally:
        await bus.close()
    print(msgspec.json.encode(engine.counts).decode(), flush=True)


def main() -> None:
    setup = msgspec.json.decode(sys.argv[1], type=EngineSetup)
    torch.set_num_threads(setup.threads)
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    uvloop.run(run_engine(setup))


if __name__ == "__main__":
    main()

"""`python -m benchmarks._engine_process SETUP`: a generator on a bus, as a run has it, whose turns end where they are planned.

Ends at Shutdown and prints what its engine counted, one JSON line.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import msgspec
import structlog
import torch
import uvloop

from actors.generator import Generator
from analysis.simulation.workload import Shape, draw
from benchmarks._planned import PlannedEngine
from bus.zeromq import zmq_bus
from configs.schema import Bus
from engine.contract import Capacity
from engine.embedded import EmbeddedEngine


class Setup(msgspec.Struct, frozen=True):
    """Travels as JSON on the command line."""

    name: str
    arbiter: str
    folder: str  # of the sockets
    checkpoint: str
    capacity: Capacity
    threads: int
    shape: Shape  # of the workload
    seed: int


async def live(setup: Setup) -> None:
    plans = {plan.trajectory_id: plan for plan in draw(setup.shape, setup.seed).plans}
    engine = PlannedEngine(EmbeddedEngine(setup.checkpoint, setup.capacity, threads=setup.threads), plans)
    bus = zmq_bus(setup.name, Path(setup.folder), Bus().queue_messages)
    try:
        await Generator(setup.name, bus, engine, setup.arbiter).run()
    finally:
        await bus.close()
    print(msgspec.json.encode(engine.counts).decode(), flush=True)


def main() -> None:
    setup = msgspec.json.decode(sys.argv[1], type=Setup)
    torch.set_num_threads(setup.threads)
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    uvloop.run(live(setup))


if __name__ == "__main__":
    main()

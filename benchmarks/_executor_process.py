"""`python -m benchmarks._executor_process BACKEND CORE FOLDER`: an executor on a bus, as a run has it; no head, no engine.

Asked by a line on its input, it prints the process ids of its fork servers, one JSON line. Ends at Shutdown.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import structlog
import uvloop

from actors.executor import Executor
from benchmarks._backends import config_of, host_of
from bus.zeromq import zmq_bus
from configs.schema import Bus
from sandbox.backend import ForkServerSandbox

EXECUTOR = "executor-0"


async def live(backend: str, core: int, folder: Path) -> None:
    config = config_of(backend, core)
    sandbox = ForkServerSandbox(host_of(backend, config), config)
    bus = zmq_bus(EXECUTOR, folder, Bus().queue_messages)
    loop = asyncio.get_running_loop()
    loop.add_reader(sys.stdin, lambda: announce(loop, sandbox))
    try:
        await Executor(bus, sandbox).run()
    finally:
        loop.remove_reader(sys.stdin)
        await bus.close()


def announce(loop: asyncio.AbstractEventLoop, sandbox: ForkServerSandbox) -> None:
    """A line that comes in is the question."""
    if sys.stdin.readline():
        print(json.dumps(sandbox.server_pids), flush=True)
    else:
        loop.remove_reader(sys.stdin)


def main() -> None:
    backend, core, folder = sys.argv[1:]
    os.sched_setaffinity(0, {int(core)})
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    uvloop.run(live(backend, int(core), Path(folder)))


if __name__ == "__main__":
    main()

"""`python -m benchmarks.support.sandbox.executor_process BACKEND CORE FOLDER`.

Runs an executor on a bus. The bus has no head and no engine. For each input line, the process
prints the process ids of its fork servers as one JSON line. The process exits at Shutdown.
"""

import asyncio
import json
import os
import sys
from pathlib import Path

import structlog
import uvloop

from asterism.actors.executor import Executor
from asterism.bus.addresses import EXECUTOR
from asterism.bus.transport.zeromq import open_zmq_bus
from asterism.configs.schema.machines import BusConfig
from asterism.sandbox.fork_server_sandbox import ForkServerSandbox
from benchmarks.support.sandbox.sandbox_backends import build_config, create_host


async def run_executor(backend: str, core: int, folder: Path) -> None:
    config = build_config(backend, core)
    sandbox = ForkServerSandbox(create_host(backend, config), config)
    bus = open_zmq_bus(EXECUTOR, folder, BusConfig().queue_messages)
    loop = asyncio.get_running_loop()
    loop.add_reader(sys.stdin, lambda: print_server_pids(loop, sandbox))
    try:
        await Executor(bus, sandbox).run()
    finally:
        loop.remove_reader(sys.stdin)
        await bus.close()


def print_server_pids(loop: asyncio.AbstractEventLoop, sandbox: ForkServerSandbox) -> None:
    """Print the fork servers' process ids for an input line."""
    if sys.stdin.readline():
        print(json.dumps(sandbox.server_pids), flush=True)
    else:
        loop.remove_reader(sys.stdin)


def main() -> None:
    backend, core, folder = sys.argv[1:]
    os.sched_setaffinity(0, {int(core)})
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    uvloop.run(run_executor(backend, int(core), Path(folder)))


if __name__ == "__main__":
    main()

"""What the sandbox does on one core, beside a process per call. JSON last, by backend.

    python -m benchmarks.sandbox [--backend docker|process|both] [--core 0] [--quick]

Everything of the service shares the core: executor, fork servers, containers and calls; in the rates the load generator
too. What is compared is measured in this run, by turns; read the ratios, for the rates follow the machine. Only the
burst's caller is elsewhere: its executor is a process of its own behind ZeroMQ, so that answers are counted as a run
would get them. A wrong, lost or second answer ends the benchmark with an error.

--quick: shorter rounds; 256 in flight at most, 64 notebooks in place of 512, a burst of 800 in place of 45,000, a mixture
of 200 calls with limits of 0.5 s and 128 MiB in place of 2,000 with 2 s and 256 MiB.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

import uvloop

from benchmarks._alone import ProcessPerCall
from benchmarks._backends import config_of, host_of
from benchmarks._burst import run_burst
from benchmarks._direct import DirectClient
from benchmarks._measures import (
    Sizes,
    added_when_idle,
    checked,
    latencies,
    live_notebooks,
    mixed,
    notebooks,
    overhead,
    rates,
)
from sandbox.backend import ForkServerSandbox
from sandbox.contract import SandboxFailure
from sandbox.load import NUMPY, PRINT, SYMPY

FULL = Sizes(
    rounds=3,
    alone={PRINT: 60, NUMPY: 15, SYMPY: 6},
    rate_s=5.0,
    overhead_s=4.0,
    in_flight={1: 1000, 16: 2000, 4096: 8192},
    idle_calls=1000,
    cells_s=5.0,
    session_starts=300,
    live_sessions=512,
    cells_each=10,
    mixed_healthy=1900,
    mixed_limit_s=2.0,
    mixed_memory_mib=256,
    burst_calls=45_000,
)
QUICK = Sizes(
    rounds=2,
    alone={PRINT: 10, NUMPY: 3, SYMPY: 1},
    rate_s=0.4,
    overhead_s=0.3,
    in_flight={1: 100, 16: 200},
    idle_calls=80,
    cells_s=0.5,
    session_starts=40,
    live_sessions=64,
    cells_each=10,
    mixed_healthy=190,
    mixed_limit_s=0.5,
    mixed_memory_mib=128,
    burst_calls=800,
)
OVERHEAD_IN_FLIGHT = 256
AT_LEAST = {
    "print_ratio": 4.0,
    "numpy_ratio": 20.0,
    "sympy_ratio": 25.0,
    "session_cells_per_s": 5000.0,
    "mixed_ratio": 0.6,
}
AT_MOST = {
    "session_start_ms": 10.0,
    "overhead_256": 0.2,
    "added_p99_ms_idle": 5.0,
    "burst_duplicates": 0.0,
    "mixed_wrong": 0.0,
}

FiguresByName = dict[str, float]


async def measure(backend: str, core: int, sizes: Sizes, alone: ProcessPerCall) -> FiguresByName:
    """Everything but the burst and the mixture."""
    config = config_of(backend, core)
    host = host_of(backend, config)
    sandbox = ForkServerSandbox(host, config)
    isolation = await sandbox.start()
    print(f"\n{backend}: namespaces {', '.join(isolation.namespaces) or 'none'}; seccomp {isolation.seccomp}")
    figures: FiguresByName = {}
    try:
        direct = await DirectClient.start(host, config, bool(isolation.namespaces))
        figures |= show(await rates(sandbox, alone, sizes))
        figures |= show(await overhead(sandbox, direct, sizes, OVERHEAD_IN_FLIGHT))
        figures |= show(await added_when_idle(sandbox, direct, sizes))
        await direct.stop()
        figures |= show(await latencies(sandbox, sizes))
        figures |= show(await notebooks(sandbox, sizes))
        figures |= show(await live_notebooks(sandbox, sizes))
    finally:
        await sandbox.close()
    return figures


async def measure_mixed(backend: str, core: int, sizes: Sizes) -> FiguresByName:
    limits = {"time_limit_s": sizes.mixed_limit_s, "memory_mib": sizes.mixed_memory_mib}
    config = config_of(backend, core, **limits)
    sandbox = ForkServerSandbox(host_of(backend, config), config)
    await sandbox.start()
    try:
        return show(await mixed(sandbox, sizes))
    finally:
        await sandbox.close()


def measure_burst(backend: str, core: int, sizes: Sizes) -> FiguresByName:
    done = run_burst(backend, core, sizes.burst_calls)
    moments = {"start": done.start, "middle": done.middle, "end": done.end}
    figures = done.figures
    shown = show(
        {
            "burst_submitted": figures.submitted,
            "burst_answered": figures.answered,
            "burst_duplicates": figures.duplicates,
            "burst_s": figures.elapsed_s,
            "burst_per_s": figures.per_s,
            **{f"burst_executor_mib_{name}": memory.executor for name, memory in moments.items()},
            **{f"burst_servers_mib_{name}": memory.servers for name, memory in moments.items()},
        }
    )
    checked(figures)
    return shown


def show(figures: FiguresByName) -> FiguresByName:
    for name, value in figures.items():
        print(f"  {name:30}{value:12,.3f}{judgement(name, value)}", flush=True)
    return figures


def judgement(name: str, value: float) -> str:
    if name in AT_LEAST:
        return f"   at least {AT_LEAST[name]:g}{'' if value >= AT_LEAST[name] else ': MISSED'}"
    if name in AT_MOST:
        return f"   at most {AT_MOST[name]:g}{'' if value <= AT_MOST[name] else ': MISSED'}"
    return ""


def all_figures(backend: str, core: int, sizes: Sizes) -> FiguresByName:
    """Raises SandboxFailure if the backend cannot start."""
    with tempfile.TemporaryDirectory() as folder:
        figures = uvloop.run(measure(backend, core, sizes, ProcessPerCall(Path(folder))))
    figures |= measure_burst(backend, core, sizes)
    figures |= uvloop.run(measure_mixed(backend, core, sizes))
    return {name: round(value, 4) for name, value in figures.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=["docker", "process", "both"], default="both")
    parser.add_argument("--core", type=int, default=min(os.sched_getaffinity(0)), help="the processor of the service")
    parser.add_argument("--quick", action="store_true", help="under a minute for both backends")
    options = parser.parse_args()
    os.sched_setaffinity(0, {options.core})
    backends = ["docker", "process"] if options.backend == "both" else [options.backend]
    figures: dict[str, FiguresByName] = {}
    for backend in backends:
        try:
            figures[backend] = all_figures(backend, options.core, QUICK if options.quick else FULL)
        except SandboxFailure as error:
            sys.exit(f"{backend}: {error}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()

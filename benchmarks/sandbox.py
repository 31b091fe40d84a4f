"""Measure the sandbox on one core against a process per call. Prints a JSON line by backend.

    python -m benchmarks.sandbox [--backend docker|process|both] [--core 0] [--quick]

The whole service shares the core: executor, fork servers, containers and calls. The rates
include the load generator on the same core. The service and its baseline alternate within this
run; compare the ratios, because the rates depend on the machine. Only the burst's caller runs on
another core: its executor is a separate process behind ZeroMQ, so the caller counts answers as a
run receives them. A wrong, lost or duplicate answer ends the benchmark with an error.

--quick: shorter rounds; at most 256 calls in flight; 64 notebooks instead of 512; a burst of 800
calls instead of 45,000; a mixture of 200 calls with limits of 0.5 s and 128 MiB instead of 2,000
calls with 2 s and 256 MiB.
"""

import os
import sys
import tempfile
from pathlib import Path

import uvloop

from asterism.sandbox.contract import SandboxFailure
from asterism.sandbox.fork_server_sandbox import ForkServerSandbox
from asterism.sandbox.load_test import NUMPY, PRINT, SYMPY
from benchmarks.support.benchmark_main import Flag, Options, benchmark_main, show_figures
from benchmarks.support.sandbox.executor_burst import compute_latency_figures, run_burst
from benchmarks.support.sandbox.raw_fork_server import DirectClient
from benchmarks.support.sandbox.sandbox_backends import ProcessPerCall, build_config, create_host
from benchmarks.support.sandbox.sandbox_measures import (
    SandboxBenchmarkSizes,
    check_figures,
    measure_gradings,
    measure_idle_overhead,
    measure_latencies,
    measure_live_notebooks,
    measure_notebooks,
    measure_overhead,
    measure_rates,
    run_mixture,
)

FULL = SandboxBenchmarkSizes(
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
    gradings=1000,
)
QUICK = SandboxBenchmarkSizes(
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
    gradings=100,
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


async def measure_service(
    backend: str, core: int, sizes: SandboxBenchmarkSizes, alone: ProcessPerCall
) -> FiguresByName:
    """Measure everything except the burst and the mixture."""
    config = build_config(backend, core)
    host = create_host(backend, config)
    sandbox = ForkServerSandbox(host, config)
    isolation = await sandbox.start()
    print(f"\n{backend}: namespaces {', '.join(isolation.namespaces) or 'none'}; seccomp {isolation.seccomp}")
    figures: FiguresByName = {}
    try:
        direct = await DirectClient.start(host, config, bool(isolation.namespaces))
        figures |= show(await measure_rates(sandbox, alone, sizes))
        figures |= show(await measure_overhead(sandbox, direct, sizes, OVERHEAD_IN_FLIGHT))
        figures |= show(await measure_idle_overhead(sandbox, direct, sizes))
        await direct.stop()
        figures |= show(await measure_latencies(sandbox, sizes))
        figures |= show(await measure_notebooks(sandbox, sizes))
        figures |= show(await measure_live_notebooks(sandbox, sizes))
        figures |= show(await measure_gradings(sandbox, sizes))
    finally:
        await sandbox.close()
    return figures


async def measure_mixed(backend: str, core: int, sizes: SandboxBenchmarkSizes) -> FiguresByName:
    limits = {"time_limit_s": sizes.mixed_limit_s, "memory_mib": sizes.mixed_memory_mib}
    config = build_config(backend, core, **limits)
    sandbox = ForkServerSandbox(create_host(backend, config), config)
    await sandbox.start()
    try:
        return show(await run_mixture(sandbox, sizes))
    finally:
        await sandbox.close()


def measure_burst(backend: str, core: int, sizes: SandboxBenchmarkSizes) -> FiguresByName:
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
            **compute_latency_figures(done),
            **{f"burst_executor_mib_{name}": memory.executor for name, memory in moments.items()},
            **{f"burst_servers_mib_{name}": memory.servers for name, memory in moments.items()},
        }
    )
    check_figures(figures)
    return shown


def show(figures: FiguresByName) -> FiguresByName:
    show_figures(figures, AT_LEAST, AT_MOST)
    return figures


def measure_all(backend: str, core: int, sizes: SandboxBenchmarkSizes) -> FiguresByName:
    """Measure one backend. Raises SandboxFailure if the sandbox cannot start."""
    with tempfile.TemporaryDirectory() as folder:
        figures = uvloop.run(measure_service(backend, core, sizes, ProcessPerCall(Path(folder))))
    figures |= measure_burst(backend, core, sizes)
    figures |= uvloop.run(measure_mixed(backend, core, sizes))
    return {name: round(value, 4) for name, value in figures.items()}


def measure(options: Options) -> dict[str, FiguresByName]:
    os.sched_setaffinity(0, {options.core})
    backends = ["docker", "process"] if options.backend == "both" else [options.backend]
    figures: dict[str, FiguresByName] = {}
    for backend in backends:
        try:
            figures[backend] = measure_all(backend, options.core, QUICK if options.quick else FULL)
        except SandboxFailure as error:
            sys.exit(f"{backend}: {error}")
    return figures


if __name__ == "__main__":
    benchmark_main(
        __doc__,
        measure,
        Flag("--backend", "both", choices=["docker", "process", "both"]),
        Flag("--core", min(os.sched_getaffinity(0)), "core of the service"),
        quick="shorter: under a minute for both backends",
    )

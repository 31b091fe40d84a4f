"""Measures one sandbox with a function for each measurement. The load runs on the core of this process."""

import asyncio
import time
from collections.abc import Iterable, Iterator
from itertools import count
from statistics import median

import msgspec

from asterism.bus.messages import AnswerSubmitted
from asterism.sandbox.fork_server_sandbox import ForkServerSandbox
from asterism.sandbox.load_test import (
    CODE,
    NUMPY,
    PRINT,
    PRINTED,
    SYMPY,
    LoadFigures,
    Probe,
    limit_duration,
    make_program_probes,
    measure_programs,
    percentile,
    run_burst,
    run_closed_loop,
)
from benchmarks.support.process_usage import list_descendants, read_private_mib
from benchmarks.support.sandbox.answer_bombs import generate_bombs
from benchmarks.support.sandbox.probes import CELL, FORKED_CELL, make_cell_probes, make_mixed_probes
from benchmarks.support.sandbox.raw_fork_server import DirectClient
from benchmarks.support.sandbox.sandbox_backends import ProcessPerCall

RATE_IN_FLIGHT = 16
NOTEBOOKS = 64
_GRADINGS_IN_FLIGHT, _BOMBS_IN_FLIGHT = 4, 16
_PAUSE_S = 0.005  # pause before a measurement of the idle service
_FIRST_NOTEBOOK, _FIRST_STARTED, _FIRST_LIVE = 1_000_000, 2_000_000, 3_000_000  # trajectory ids


class InvalidAnswers(Exception):
    """A call did not get exactly one correct answer, so the figures are invalid."""


class SandboxBenchmarkSizes(msgspec.Struct, frozen=True):
    """Sizes of the measurements: seconds of load and numbers of calls."""

    rounds: int  # rounds of the compared variants, which alternate so that drift of the machine affects both
    alone: dict[str, int]  # number of processes per round of each program
    rate_s: float  # seconds per round for each kind of program
    overhead_s: float  # seconds per round for each of the two clients
    in_flight: dict[int, int]  # number of calls in flight -> number of measured calls
    idle_calls: int
    cells_s: float
    session_starts: int
    live_sessions: int
    cells_each: int
    mixed_healthy: int
    mixed_limit_s: float
    mixed_memory_mib: int
    burst_calls: int
    gradings: int


def check_figures(figures: LoadFigures) -> LoadFigures:
    if figures.failures or figures.duplicates or figures.out_of_order or figures.answered != figures.submitted:
        raise InvalidAnswers(
            f"{figures.answered} of {figures.submitted} answered, {figures.duplicates} twice, "
            f"{figures.out_of_order} overtaken: {figures.failures}"
        )
    return figures


async def run_load(sandbox: ForkServerSandbox, probes: Iterable[Probe], in_flight: int) -> LoadFigures:
    return check_figures((await run_closed_loop(sandbox, probes, in_flight)).compute_figures())


# ---------------------------------------------------------------- grading


async def measure_gradings(sandbox: ForkServerSandbox, sizes: SandboxBenchmarkSizes) -> dict[str, float]:
    """Grade answers that math-verify compares: first alone, then next to answers that take too long."""
    await _grade_honestly(sandbox, 20)  # uncounted call that starts the grader
    began = time.perf_counter()
    alone = await _grade_honestly(sandbox, sizes.gradings)
    elapsed_s = time.perf_counter() - began
    bombs = iter(generate_bombs(1000, seed=0))
    bombing = [asyncio.create_task(_grade_bombs(sandbox, bombs)) for _ in range(_BOMBS_IN_FLIGHT)]
    next_to_bombs = await _grade_honestly(sandbox, sizes.gradings)
    for task in bombing:
        task.cancel()
    await asyncio.gather(*bombing, return_exceptions=True)
    return {
        "gradings_per_s": sizes.gradings / elapsed_s,
        "honest_p99_ms": 1000 * percentile(alone, 99),
        "honest_p99_ms_beside_bombs": 1000 * percentile(next_to_bombs, 99),
    }


async def _grade_honestly(sandbox: ForkServerSandbox, count: int) -> list[float]:
    """Return the seconds of each grading."""
    numbers, seconds = iter(range(count)), list[float]()

    async def grade() -> None:
        for number in numbers:
            began = time.perf_counter()
            verdict = await sandbox.grade(AnswerSubmitted(number, f"x+{number}", f"{number}+x"))
            seconds.append(time.perf_counter() - began)
            if not verdict.correct:
                raise InvalidAnswers(f"x+{number} is graded as wrong")

    await asyncio.gather(*(grade() for _ in range(_GRADINGS_IN_FLIGHT)))
    return seconds


async def _grade_bombs(sandbox: ForkServerSandbox, bombs: Iterator[str]) -> None:
    for number, bomb in enumerate(bombs):
        if (await sandbox.grade(AnswerSubmitted(number, bomb, "123456789x+1"))).correct:
            raise InvalidAnswers(f"{bomb} is graded as correct")


# ---------------------------------------------------------------- rates


async def measure_rates(
    sandbox: ForkServerSandbox, alone: ProcessPerCall, sizes: SandboxBenchmarkSizes
) -> dict[str, float]:
    """Return the call rate of each kind of program and its ratio to the rate of a process per call."""
    figures: dict[str, float] = {}
    for kind in (PRINT, NUMPY, SYMPY):
        alone.measure_seconds(CODE[kind], PRINTED[kind], 1)
        await run_load(sandbox, make_program_probes(kind, range(RATE_IN_FLIGHT)), RATE_IN_FLIGHT)
        alone_s = service_s = 0.0
        calls = 0
        for _ in range(sizes.rounds):
            alone_s += alone.measure_seconds(CODE[kind], PRINTED[kind], sizes.alone[kind])
            done = check_figures(await measure_programs(sandbox, kind, RATE_IN_FLIGHT, sizes.rate_s))
            calls += done.answered
            service_s += done.elapsed_s
        alone_per_s = sizes.rounds * sizes.alone[kind] / alone_s
        figures[f"{kind}_per_s"] = calls / service_s
        figures[f"{kind}_alone_per_s"] = alone_per_s
        figures[f"{kind}_ratio"] = calls / service_s / alone_per_s
    return figures


# ---------------------------------------------------------------- latency and executor overhead


async def measure_latencies(sandbox: ForkServerSandbox, sizes: SandboxBenchmarkSizes) -> dict[str, float]:
    figures: dict[str, float] = {}
    for in_flight, calls in sizes.in_flight.items():
        done = await run_load(sandbox, make_program_probes(PRINT, range(calls)), in_flight)
        figures[f"p50_ms_{in_flight}"] = done.p50_ms
        figures[f"p99_ms_{in_flight}"] = done.p99_ms
    return figures


async def measure_overhead(
    sandbox: ForkServerSandbox, direct: DirectClient, sizes: SandboxBenchmarkSizes, in_flight: int
) -> dict[str, float]:
    """Return the overhead: the sandbox's time per call over the bare client's time per call, minus one."""
    through_s: list[float] = []
    direct_s: list[float] = []
    latencies_ms: list[float] = []
    direct.measure_seconds_per_call(CODE[PRINT], RATE_IN_FLIGHT, 0)
    for _ in range(sizes.rounds):
        direct_s.append(direct.measure_seconds_per_call(CODE[PRINT], in_flight, sizes.overhead_s))
        done = check_figures(await measure_programs(sandbox, PRINT, in_flight, sizes.overhead_s))
        through_s.append(done.elapsed_s / done.answered)
        latencies_ms += done.latencies_ms
    latencies_ms.sort()
    return {
        f"overhead_{in_flight}": sum(through_s) / sum(direct_s) - 1,
        f"direct_ms_per_call_{in_flight}": 1000 * sum(direct_s) / sizes.rounds,
        f"p50_ms_{in_flight}": percentile(latencies_ms, 50),
        f"p99_ms_{in_flight}": percentile(latencies_ms, 99),
    }


async def measure_idle_overhead(
    sandbox: ForkServerSandbox, direct: DirectClient, sizes: SandboxBenchmarkSizes
) -> dict[str, float]:
    """Return the time that a call through the idle sandbox takes beyond the median direct call."""
    direct_ms: list[float] = []
    through_ms: list[float] = []
    for number in range(sizes.idle_calls):
        await asyncio.sleep(_PAUSE_S)
        direct_ms.append(1000 * direct.measure_seconds_per_call(CODE[PRINT], 1, 0))
        await asyncio.sleep(_PAUSE_S)
        through_ms += (await run_load(sandbox, make_program_probes(PRINT, [number]), 1)).latencies_ms
    usual_ms = median(direct_ms)
    added_ms = sorted(latency_ms - usual_ms for latency_ms in through_ms)
    return {
        "idle_direct_ms": usual_ms,
        "added_p50_ms_idle": percentile(added_ms, 50),
        "added_p99_ms_idle": percentile(added_ms, 99),
    }


# ---------------------------------------------------------------- notebooks


async def measure_notebooks(sandbox: ForkServerSandbox, sizes: SandboxBenchmarkSizes) -> dict[str, float]:
    """Return the cell rates of live notebooks with and without a fork, and the time of a notebook's first cell.

    Each notebook has one cell in flight.
    """
    numbers = range(_FIRST_NOTEBOOK, _FIRST_NOTEBOOK + NOTEBOOKS)
    await run_load(sandbox, make_cell_probes(CELL, numbers, [0]), NOTEBOOKS)
    figures: dict[str, float] = {}
    for name, kind, first in (("session", CELL, 1), ("forked", FORKED_CELL, 1_000_000)):
        done = await run_load(
            sandbox, limit_duration(make_cell_probes(kind, numbers, count(first)), sizes.cells_s), NOTEBOOKS
        )
        figures[f"{name}_cells_per_s"] = done.per_s
    for number in numbers:
        await sandbox.end_notebook(number)
    starts_ms: list[float] = []
    for number in range(_FIRST_STARTED, _FIRST_STARTED + sizes.session_starts):
        starts_ms += (await run_load(sandbox, make_cell_probes(CELL, [number], [0]), 1)).latencies_ms
        await sandbox.end_notebook(number)
    starts_ms.sort()
    return {
        **figures,
        "session_start_ms": percentile(starts_ms, 50),
        "session_start_p99_ms": percentile(starts_ms, 99),
    }


async def measure_live_notebooks(sandbox: ForkServerSandbox, sizes: SandboxBenchmarkSizes) -> dict[str, float]:
    """Run some cells in many live notebooks, then measure the memory of each idle notebook."""
    numbers = range(_FIRST_LIVE, _FIRST_LIVE + sizes.live_sessions)
    before_mib = read_private_mib(list_descendants(sandbox.server_pids))
    started = time.perf_counter()
    await run_load(sandbox, make_cell_probes(CELL, numbers, range(sizes.cells_each)), sizes.live_sessions)
    seconds = time.perf_counter() - started
    await asyncio.sleep(_PAUSE_S)
    after_mib = read_private_mib(list_descendants(sandbox.server_pids))
    for number in numbers:
        await sandbox.end_notebook(number)
    return {
        "sessions_live": sizes.live_sessions,
        "sessions_s": seconds,
        "session_idle_mib": (after_mib - before_mib) / sizes.live_sessions,
    }


# ---------------------------------------------------------------- misbehaving neighbours


async def run_mixture(sandbox: ForkServerSandbox, sizes: SandboxBenchmarkSizes) -> dict[str, float]:
    """Return the rate of healthy calls next to misbehaving calls, relative to the rate of healthy calls alone.

    Misbehaving calls loop, fill memory and print. The rate alone is measured before and after the mixture.
    """
    await _measure_clean_s(sandbox, RATE_IN_FLIGHT)  # warm-up, not counted
    clean_s = await _measure_clean_s(sandbox, sizes.mixed_healthy)
    tally = await run_burst(sandbox, make_mixed_probes(sizes.mixed_healthy))
    clean_s = (clean_s + await _measure_clean_s(sandbox, sizes.mixed_healthy)) / 2
    everything, healthy = tally.compute_figures(), check_figures(tally.compute_figures(PRINT))
    for cause, calls in everything.failures.items():
        print(f"  in the mixture, {calls} times: {cause}")
    return {
        "mixed_ratio": clean_s / healthy.elapsed_s,
        "mixed_healthy_per_s": healthy.per_s,
        "mixed_healthy_p99_ms": healthy.p99_ms,
        "clean_per_s": sizes.mixed_healthy / clean_s,
        "mixed_submitted": everything.submitted,
        "mixed_s": everything.elapsed_s,
        "mixed_wrong": sum(everything.failures.values()),
    }


async def _measure_clean_s(sandbox: ForkServerSandbox, calls: int) -> float:
    return check_figures(
        (await run_burst(sandbox, list(make_program_probes(PRINT, range(calls))))).compute_figures()
    ).elapsed_s

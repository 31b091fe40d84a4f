"""What is measured of one sandbox, each in its own function, all on the core that this process is bound to."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator
from itertools import count
from statistics import median

import msgspec

from benchmarks._alone import ProcessPerCall
from benchmarks._direct import DirectClient
from benchmarks._memory import descendants, private_mib
from sandbox.backend import ForkServerSandbox
from sandbox.load import (
    CELL,
    CODE,
    FORKED_CELL,
    NUMPY,
    PRINT,
    SYMPY,
    Figures,
    Probe,
    burst,
    cells,
    closed_loop,
    for_seconds,
    mixture,
    percentile,
    programs,
)

RATE_IN_FLIGHT = 16
NOTEBOOKS = 64
PRINTED = {PRINT: "2\n", NUMPY: "499500\n", SYMPY: "[2, 3]\n"}
_PAUSE_S = 0.005  # in which the service comes to rest
_FIRST_NOTEBOOK, _FIRST_STARTED, _FIRST_LIVE = 1_000_000, 2_000_000, 3_000_000  # trajectories


class WrongAnswers(Exception):
    """A call was lost, failed, answered twice or wrongly: the figures would mean nothing."""


class Sizes(msgspec.Struct, frozen=True):
    """How much of each is done: seconds of load, and numbers of calls."""

    rounds: int  # in which what is compared takes turns, so that the machine's drift meets both
    alone: dict[str, int]  # processes a round
    rate_s: float  # a round of each kind
    overhead_s: float  # a round, of each of the two ways
    in_flight: dict[int, int]  # calls, by how many are in flight
    idle_calls: int
    cells_s: float
    session_starts: int
    live_sessions: int
    cells_each: int
    mixed_healthy: int
    mixed_limit_s: float
    mixed_memory_mib: int
    burst_calls: int


def checked(figures: Figures) -> Figures:
    if figures.failures or figures.duplicates or figures.overtaken or figures.answered != figures.submitted:
        raise WrongAnswers(
            f"{figures.answered} of {figures.submitted} answered, {figures.duplicates} twice, "
            f"{figures.overtaken} overtaken: {figures.failures}"
        )
    return figures


async def load(sandbox: ForkServerSandbox, probes: Iterable[Probe], in_flight: int) -> Figures:
    return checked((await closed_loop(sandbox, probes, in_flight)).figures())


def endless(kind: str) -> Iterator[Probe]:
    return programs(kind, count())


# ---------------------------------------------------------------- rates


async def rates(sandbox: ForkServerSandbox, alone: ProcessPerCall, sizes: Sizes) -> dict[str, float]:
    """Of each kind the calls per second, and as a ratio to a process per call; both by turns."""
    figures: dict[str, float] = {}
    for kind in (PRINT, NUMPY, SYMPY):
        alone.seconds(CODE[kind], PRINTED[kind], 1)
        await load(sandbox, programs(kind, range(RATE_IN_FLIGHT)), RATE_IN_FLIGHT)
        alone_s = service_s = 0.0
        calls = 0
        for _ in range(sizes.rounds):
            alone_s += alone.seconds(CODE[kind], PRINTED[kind], sizes.alone[kind])
            done = await load(sandbox, for_seconds(endless(kind), sizes.rate_s), RATE_IN_FLIGHT)
            calls += done.answered
            service_s += done.elapsed_s
        alone_per_s = sizes.rounds * sizes.alone[kind] / alone_s
        figures[f"{kind}_per_s"] = calls / service_s
        figures[f"{kind}_alone_per_s"] = alone_per_s
        figures[f"{kind}_ratio"] = calls / service_s / alone_per_s
    return figures


# ---------------------------------------------------------------- latency and what the executor adds


async def latencies(sandbox: ForkServerSandbox, sizes: Sizes) -> dict[str, float]:
    figures: dict[str, float] = {}
    for in_flight, calls in sizes.in_flight.items():
        done = await load(sandbox, programs(PRINT, range(calls)), in_flight)
        figures[f"p50_ms_{in_flight}"] = done.p50_ms
        figures[f"p99_ms_{in_flight}"] = done.p99_ms
    return figures


async def overhead(sandbox: ForkServerSandbox, direct: DirectClient, sizes: Sizes, in_flight: int) -> dict[str, float]:
    """Time per call through the sandbox over the time per call of a client that does nothing else, minus one."""
    through_s: list[float] = []
    direct_s: list[float] = []
    latencies_ms: list[float] = []
    direct.seconds_per_call(CODE[PRINT], RATE_IN_FLIGHT, 0)
    for _ in range(sizes.rounds):
        direct_s.append(direct.seconds_per_call(CODE[PRINT], in_flight, sizes.overhead_s))
        done = await load(sandbox, for_seconds(endless(PRINT), sizes.overhead_s), in_flight)
        through_s.append(done.elapsed_s / done.answered)
        latencies_ms += done.latencies_ms
    latencies_ms.sort()
    return {
        f"overhead_{in_flight}": sum(through_s) / sum(direct_s) - 1,
        f"direct_ms_per_call_{in_flight}": 1000 * sum(direct_s) / sizes.rounds,
        f"p50_ms_{in_flight}": percentile(latencies_ms, 50),
        f"p99_ms_{in_flight}": percentile(latencies_ms, 99),
    }


async def added_when_idle(sandbox: ForkServerSandbox, direct: DirectClient, sizes: Sizes) -> dict[str, float]:
    """What each call to a service at rest takes beyond the median of direct calls to a fork server at rest."""
    direct_ms: list[float] = []
    through_ms: list[float] = []
    for number in range(sizes.idle_calls):
        await asyncio.sleep(_PAUSE_S)
        direct_ms.append(1000 * direct.seconds_per_call(CODE[PRINT], 1, 0))
        await asyncio.sleep(_PAUSE_S)
        through_ms += (await load(sandbox, programs(PRINT, [number]), 1)).latencies_ms
    usual_ms = median(direct_ms)
    added_ms = sorted(latency_ms - usual_ms for latency_ms in through_ms)
    return {
        "idle_direct_ms": usual_ms,
        "added_p50_ms_idle": percentile(added_ms, 50),
        "added_p99_ms_idle": percentile(added_ms, 99),
    }


# ---------------------------------------------------------------- notebooks


async def notebooks(sandbox: ForkServerSandbox, sizes: Sizes) -> dict[str, float]:
    """Cells per second of notebooks that are live, one cell of each in flight: plain ones, and ones that need a fork; and how
    long a first cell takes."""
    numbers = range(_FIRST_NOTEBOOK, _FIRST_NOTEBOOK + NOTEBOOKS)
    await load(sandbox, cells(CELL, numbers, [0]), NOTEBOOKS)
    figures: dict[str, float] = {}
    for name, kind, first in (("session", CELL, 1), ("forked", FORKED_CELL, 1_000_000)):
        done = await load(sandbox, for_seconds(cells(kind, numbers, count(first)), sizes.cells_s), NOTEBOOKS)
        figures[f"{name}_cells_per_s"] = done.per_s
    for number in numbers:
        await sandbox.end_session(number)
    starts_ms: list[float] = []
    for number in range(_FIRST_STARTED, _FIRST_STARTED + sizes.session_starts):
        starts_ms += (await load(sandbox, cells(CELL, [number], [0]), 1)).latencies_ms
        await sandbox.end_session(number)
    starts_ms.sort()
    return {
        **figures,
        "session_start_ms": percentile(starts_ms, 50),
        "session_start_p99_ms": percentile(starts_ms, 99),
    }


async def live_notebooks(sandbox: ForkServerSandbox, sizes: Sizes) -> dict[str, float]:
    """So many notebooks at once, some cells each; then what each of them holds while nothing runs."""
    numbers = range(_FIRST_LIVE, _FIRST_LIVE + sizes.live_sessions)
    before_mib = private_mib(descendants(sandbox.server_pids))
    started = time.perf_counter()
    await load(sandbox, cells(CELL, numbers, range(sizes.cells_each)), sizes.live_sessions)
    seconds = time.perf_counter() - started
    await asyncio.sleep(_PAUSE_S)
    after_mib = private_mib(descendants(sandbox.server_pids))
    for number in numbers:
        await sandbox.end_session(number)
    return {
        "sessions_live": sizes.live_sessions,
        "sessions_s": seconds,
        "session_idle_mib": (after_mib - before_mib) / sizes.live_sessions,
    }


# ---------------------------------------------------------------- neighbours that misbehave


async def mixed(sandbox: ForkServerSandbox, sizes: Sizes) -> dict[str, float]:
    """The healthy calls' rate with neighbours that loop, fill the memory and print, over their rate alone before and after."""
    await _clean_s(sandbox, RATE_IN_FLIGHT)  # a start that is not counted
    clean_s = await _clean_s(sandbox, sizes.mixed_healthy)
    tally = await burst(sandbox, mixture(sizes.mixed_healthy))
    clean_s = (clean_s + await _clean_s(sandbox, sizes.mixed_healthy)) / 2
    everything, healthy = tally.figures(), checked(tally.figures(PRINT))
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


async def _clean_s(sandbox: ForkServerSandbox, calls: int) -> float:
    return checked((await burst(sandbox, list(programs(PRINT, range(calls))))).figures()).elapsed_s

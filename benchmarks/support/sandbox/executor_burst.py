"""Sends a step's calls at once over ZeroMQ to an executor process, and counts each answer."""

import asyncio
import json
import os
import sys
import tempfile
import time
from asyncio.subprocess import PIPE, Process
from pathlib import Path

import msgspec

from asterism.bus.addresses import ROLLOUT
from asterism.bus.bus import Bus
from asterism.bus.messages import CallFailed, CodeFinished, Shutdown
from asterism.bus.transport.zeromq import open_zmq_bus
from asterism.configs.schema.machines import BusConfig as BusConfig
from asterism.sandbox.load_test import CallId, CallTally, LoadFigures, percentile
from benchmarks.support.process_usage import list_descendants, read_proportional_mib, read_resident_mib
from benchmarks.support.sandbox.executor_process import EXECUTOR
from benchmarks.support.sandbox.probes import make_numbered_probes

REPORT_CALLS, REPORT_LATENCY_S = 45_000, 0.3  # calls per training step, and mean end-to-end seconds of a call
_CLIENT = ROLLOUT
_ANSWER_TIMEOUT_S = 60.0  # maximum time between two answers


class ExecutorUnresponsive(Exception):
    """The executor exited, or it sent no answer within the timeout."""


class BurstMemory(msgspec.Struct, frozen=True):
    """Memory of the executor, and memory of its fork servers with their descendants; in MiB."""

    executor: float
    servers: float


class BurstResult(msgspec.Struct, frozen=True):
    figures: LoadFigures
    start: BurstMemory  # memory after the first call
    middle: BurstMemory  # memory after half of the answers
    end: BurstMemory
    ran_ms: list[float]  # time that each answered call runs in the sandbox, in the order of the answers
    queued_ms: list[float]  # remaining time of the same calls between request and answer


def compute_latency_figures(result: BurstResult, cores: int = 1) -> dict[str, float]:
    """Compute the burst's latencies, and the cores that the report's step (45K calls, 0.3 s each) needs at this rate.

    If all calls of the step arrive at once, the mean wait is half of the time that the service needs for all calls. If
    calls arrive evenly over the step, only their CPU time counts. `cores` is the number of cores of the service.
    """
    figures = result.figures
    rate_per_core = figures.per_s / cores
    latencies = {"total": figures.latencies_ms, "queued": sorted(result.queued_ms), "ran": sorted(result.ran_ms)}
    shown = {
        f"burst_{name}_p{percent}_ms": percentile(values, percent)
        for name, values in latencies.items()
        for percent in (50, 99)
    }
    at_once = REPORT_CALLS / (2 * REPORT_LATENCY_S * rate_per_core) if rate_per_core else 0.0
    return shown | {
        "report_45k_cpu_s": REPORT_CALLS / rate_per_core if rate_per_core else 0.0,
        "report_45k_at_once_cores": at_once,
    }


async def send_burst(backend: str, core: int, calls: int) -> BurstResult:
    """Send `calls` calls to an executor process that runs on `core`. The cores of this process do not change."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, "-m", "benchmarks.support.sandbox.executor_process", backend, str(core), name]
        executor = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
        bus = open_zmq_bus(_CLIENT, folder, BusConfig().queue_messages)
        try:
            return await _send_burst(bus, executor, calls)
        finally:
            if executor.returncode is None:
                executor.terminate()
            await executor.wait()
            await bus.close()


async def _send_burst(bus: Bus, executor: Process, calls: int) -> BurstResult:
    tally = CallTally()
    await _send(bus, tally, range(-1, 0))  # wait for the answer to one call: the servers then run
    await _receive(bus, executor, tally, down_to=0)
    servers = await _query_servers(executor)
    start = _measure_memory(executor.pid, servers)
    tally, times = CallTally(), _CallTimes()
    await _send(bus, tally, range(calls), times)
    await _receive(bus, executor, tally, down_to=calls // 2, times=times)
    middle = _measure_memory(executor.pid, servers)
    await _receive(bus, executor, tally, down_to=0, times=times)
    end = _measure_memory(executor.pid, servers)
    await bus.send(EXECUTOR, Shutdown())
    await executor.wait()
    while bus.waiting:  # count surplus answers
        await _receive_one(bus, tally)
    return BurstResult(tally.compute_figures(), start, middle, end, times.ran_ms, times.queued_ms)


class _CallTimes:
    def __init__(self) -> None:
        self.ran_ms: list[float] = []
        self.queued_ms: list[float] = []
        self._asked_at: dict[CallId, float] = {}

    def record_request(self, call_id: CallId, now: float) -> None:
        self._asked_at[call_id] = now

    def record_answer(self, call_id: CallId, duration_s: float, now: float) -> None:
        """Record the first answer of a call."""
        asked_at = self._asked_at.pop(call_id, None)
        if asked_at is not None:
            self.ran_ms.append(1000 * duration_s)
            self.queued_ms.append(1000 * max(0.0, now - asked_at - duration_s))


async def _query_servers(executor: Process) -> list[int]:
    assert executor.stdin is not None
    assert executor.stdout is not None
    executor.stdin.write(b"\n")
    return json.loads(await executor.stdout.readline())


async def _send(bus: Bus, tally: CallTally, numbers: range, times: _CallTimes | None = None) -> None:
    for probe in make_numbered_probes(numbers):
        now = time.perf_counter()
        tally.record_request(probe, now)
        if times is not None:
            times.record_request(probe.call_id, now)
        await bus.send(EXECUTOR, probe.call)


async def _receive(
    bus: Bus, executor: Process, tally: CallTally, down_to: int, times: _CallTimes | None = None
) -> None:
    """Receive until at most `down_to` calls lack an answer. Raises ExecutorUnresponsive."""

    async def receive() -> None:
        while tally.unanswered > down_to:
            await _receive_one(bus, tally, times)

    receiving, ending = asyncio.create_task(receive()), asyncio.create_task(executor.wait())
    before = tally.unanswered + 1
    try:
        while not receiving.done():
            if ending.done() or tally.unanswered == before:
                raise ExecutorUnresponsive(
                    f"{tally.unanswered} calls have no answer; the executor's exit code is {executor.returncode}"
                )
            before = tally.unanswered
            await asyncio.wait({receiving, ending}, timeout=_ANSWER_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (receiving, ending):
            task.cancel()
        await asyncio.gather(receiving, ending, return_exceptions=True)
    receiving.result()


async def _receive_one(bus: Bus, tally: CallTally, times: _CallTimes | None = None) -> None:
    match (await bus.receive()).message:
        case CodeFinished() as answer:
            call_id, now = (answer.trajectory_id, answer.call), time.perf_counter()
            tally.record_outcome(call_id, answer.outcome, now)
            if times is not None:
                times.record_answer(call_id, answer.duration_s, now)
        case CallFailed() as answer:
            tally.record_failure((answer.trajectory_id, answer.call), answer.cause, time.perf_counter())
        case other:
            raise AssertionError(f"the executor sent {type(other).__name__}")


def _measure_memory(executor: int, servers: list[int]) -> BurstMemory:
    return BurstMemory(read_resident_mib(executor), read_proportional_mib(list_descendants(servers)))


def run_burst(backend: str, core: int, calls: int) -> BurstResult:
    """Run the burst. This process leaves `core` if another core is available."""
    before = os.sched_getaffinity(0)
    others = set(range(os.cpu_count() or 1)) - {core}
    os.sched_setaffinity(0, others or before)
    try:
        return asyncio.run(send_burst(backend, core, calls))
    finally:
        os.sched_setaffinity(0, before)

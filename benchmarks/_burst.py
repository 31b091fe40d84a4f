"""A step's calls sent at once to an executor in a process of its own, over ZeroMQ, and every answer counted as it comes."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from asyncio.subprocess import PIPE, Process
from pathlib import Path

import msgspec

from benchmarks._executor_process import EXECUTOR
from benchmarks._memory import descendants, resident_mib, shared_out_mib
from bus.messages import CallFailed, CodeFinished, Shutdown
from bus.transport import Bus
from bus.zeromq import zmq_bus
from configs.schema import Bus as BusConfig
from sandbox.load import Figures, Tally, numbered_programs

_CLIENT = "rollout-0"
_SILENCE_S = 60.0  # without an answer, after which none is waited for


class NoMoreAnswers(Exception):
    """The executor ended, or fell silent."""


class Memory(msgspec.Struct, frozen=True):
    """MiB. The executor's own, and what its fork servers and all that they started take together."""

    executor: float
    servers: float


class Burst(msgspec.Struct, frozen=True):
    figures: Figures
    start: Memory  # after a first call
    middle: Memory  # half of the answers are there
    end: Memory


async def burst(backend: str, core: int, calls: int) -> Burst:
    """The executor is on `core`; this process, which is not part of the service, is wherever it may be."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, "-m", "benchmarks._executor_process", backend, str(core), name]
        executor = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
        bus = zmq_bus(_CLIENT, folder, BusConfig().queue_messages)
        try:
            return await _burst(bus, executor, calls)
        finally:
            if executor.returncode is None:
                executor.terminate()
            await executor.wait()
            await bus.close()


async def _burst(bus: Bus, executor: Process, calls: int) -> Burst:
    tally = Tally()
    await _send(bus, tally, range(-1, 0))  # a first call: the servers are up when it is answered
    await _receive(bus, executor, tally, down_to=0)
    servers = await _servers(executor)
    start = _memory(executor.pid, servers)
    tally = Tally()
    await _send(bus, tally, range(calls))
    await _receive(bus, executor, tally, down_to=calls // 2)
    middle = _memory(executor.pid, servers)
    await _receive(bus, executor, tally, down_to=0)
    end = _memory(executor.pid, servers)
    await bus.send(EXECUTOR, Shutdown())
    await executor.wait()
    while bus.waiting:  # whatever it sent beyond the answers that were waited for
        await _receive_one(bus, tally)
    return Burst(tally.figures(), start, middle, end)


async def _servers(executor: Process) -> list[int]:
    assert executor.stdin is not None
    assert executor.stdout is not None
    executor.stdin.write(b"\n")
    return json.loads(await executor.stdout.readline())


async def _send(bus: Bus, tally: Tally, numbers: range) -> None:
    for probe in numbered_programs(numbers):
        tally.asked(probe, time.perf_counter())
        await bus.send(EXECUTOR, probe.call)


async def _receive(bus: Bus, executor: Process, tally: Tally, down_to: int) -> None:
    """Until no more than so many calls are without an answer. Raises NoMoreAnswers."""

    async def receive() -> None:
        while tally.unanswered > down_to:
            await _receive_one(bus, tally)

    receiving, ending = asyncio.create_task(receive()), asyncio.create_task(executor.wait())
    before = tally.unanswered + 1
    try:
        while not receiving.done():
            if ending.done() or tally.unanswered == before:
                raise NoMoreAnswers(
                    f"{tally.unanswered} calls have no answer; the executor's exit code is {executor.returncode}"
                )
            before = tally.unanswered
            await asyncio.wait({receiving, ending}, timeout=_SILENCE_S, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (receiving, ending):
            task.cancel()
        await asyncio.gather(receiving, ending, return_exceptions=True)
    receiving.result()


async def _receive_one(bus: Bus, tally: Tally) -> None:
    match (await bus.receive()).message:
        case CodeFinished() as answer:
            tally.finished((answer.trajectory_id, answer.call), answer.outcome, time.perf_counter())
        case CallFailed() as answer:
            tally.failed((answer.trajectory_id, answer.call), answer.cause, time.perf_counter())
        case other:
            raise AssertionError(f"the executor sent {type(other).__name__}")


def _memory(executor: int, servers: list[int]) -> Memory:
    return Memory(resident_mib(executor), shared_out_mib(descendants(servers)))


def run_burst(backend: str, core: int, calls: int) -> Burst:
    """Leaves the core to the service, if there is another one."""
    before = os.sched_getaffinity(0)
    others = set(range(os.cpu_count() or 1)) - {core}
    os.sched_setaffinity(0, others or before)
    try:
        return asyncio.run(burst(backend, core, calls))
    finally:
        os.sched_setaffinity(0, before)

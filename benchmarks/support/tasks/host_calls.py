"""Measures calls of instances in one host process: their rate, and the memory of the instances."""

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager

from asterism.bus.messages import OPENING_CALL, EnvironmentCalled, Observation
from asterism.configs.schema.run_config import RunConfig
from asterism.configs.schema.tasks import TaskConfig
from asterism.policies.tools.task_description import TaskDescription
from asterism.tasks.hosting.host_pool import CallResult, HostPool
from asterism.tasks.hosting.task_services import build_host_command
from asterism.tasks.hosting.wire import ProgramEnded, RunProgram
from benchmarks.support.process_memory import read_resident_mib
from benchmarks.support.tasks.counters import Counter, SyncCounter

TASK = "counter"
DESCRIPTION = TaskDescription("environment", has_reward=True)
ROW = b'{"question": "Count."}'
ADDITION = ("add", b'{"amount": 1}')
_OPENINGS_IN_FLIGHT = 256


class WrongResult(Exception):
    """An instance returned a wrong total."""


def build_run(environment: type[Counter | SyncCounter]) -> RunConfig:
    import_path = f"{environment.__module__}:{environment.__name__}"
    return RunConfig(name="benchmark", tasks=(TaskConfig(name=TASK, import_path=import_path, data="unread.jsonl"),))


@asynccontextmanager
async def open_pool(environment: type[Counter | SyncCounter]) -> AsyncGenerator[HostPool]:
    """Open a pool with one process."""
    command = build_host_command(build_run(environment).resolved_tasks[0], DESCRIPTION, "")
    pool = HostPool(command, DESCRIPTION, _run_no_program)
    try:
        yield pool
    finally:
        await pool.close()


async def open_instance(pool: HostPool, trajectory_id: int) -> CallResult:
    return await pool.call(EnvironmentCalled(trajectory_id, OPENING_CALL, TASK, "", ROW))


async def add_one(pool: HostPool, trajectory_id: int, call: int) -> CallResult:
    """Add 1 to an instance. `call` counts from 0. Raises WrongResult."""
    result = await pool.call(EnvironmentCalled(trajectory_id, call, TASK, *ADDITION))
    if result.outcome != Observation(str(call + 1)):
        raise WrongResult(f"call {call} of instance {trajectory_id}: {result.outcome}")
    return result


async def measure_steps(environment: type[Counter | SyncCounter], instances: int, for_s: float) -> float:
    """Return the calls per second of `instances` that always have a call in flight."""
    async with open_pool(environment) as pool:
        await _open_instances(pool, range(instances))
        began_s = time.perf_counter()
        totals = await asyncio.gather(*(_call_until(pool, each, began_s + for_s) for each in range(instances)))
        return sum(totals) / (time.perf_counter() - began_s)


async def measure_memory(instances: int) -> float:
    """Return the MiB of a host process per 1,000 instances, each of which has been called once."""
    async with open_pool(Counter) as pool:
        await _open_instances(pool, range(1))  # starts the process
        (pid,) = pool.pids
        before_mib = read_resident_mib(pid)
        await _open_instances(pool, range(1, instances + 1))
        return (read_resident_mib(pid) - before_mib) / instances * 1000


async def _call_until(pool: HostPool, trajectory_id: int, end_s: float) -> int:
    """Return the number of calls, including the first call by _open_instances."""
    calls = 1
    while time.perf_counter() < end_s:
        await add_one(pool, trajectory_id, calls)
        calls += 1
    return calls


async def _open_instances(pool: HostPool, trajectory_ids: Iterable[int]) -> None:
    """Open and call each instance."""
    remaining = iter(trajectory_ids)

    async def open_next() -> None:
        for trajectory_id in remaining:
            await open_instance(pool, trajectory_id)
            await add_one(pool, trajectory_id, 0)

    await asyncio.gather(*(open_next() for _ in range(_OPENINGS_IN_FLIGHT)))


async def _run_no_program(request: RunProgram) -> ProgramEnded:
    return ProgramEnded(request.number, fault="the benchmark has no sandbox")

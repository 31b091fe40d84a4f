"""Networks over each transport, whose processes communicate and can be restarted."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

import pytest

from asterism.bus.bus import Bus
from asterism.bus.messages import CodeRequested, LeaseRequested
from asterism.bus.transport.curve_auth import generate_key, load_key
from asterism.bus.transport.in_process import Hub
from asterism.bus.transport.zeromq import open_zmq_bus
from tests.bus.clusters import Cluster

# In a cluster, every process is on a separate node.
IN_TESTS = ("in_process", "zeromq", pytest.param("cluster", marks=pytest.mark.slow))


class Join(Protocol):
    def __call__(self, process: str, epoch: int = 0) -> Bus: ...


@asynccontextmanager
async def network(kind: str, folder: Path, bound: int = 1000) -> AsyncIterator[Join]:
    joined = list[Bus]()
    open_bus = _make_join(kind, folder, bound)

    def join(process: str, epoch: int = 0) -> Bus:
        joined.append(open_bus(process, epoch))
        return joined[-1]

    yield join
    for bus in joined:
        await bus.close()


def _make_join(kind: str, folder: Path, bound: int) -> Callable[[str, int], Bus]:
    if kind == "in_process":
        hub = Hub()
        return lambda process, epoch: hub.join(process, bound, epoch)
    if kind == "zeromq":
        return lambda process, epoch: open_zmq_bus(process, folder, bound, epoch)
    cluster = Cluster(folder, load_key(generate_key(folder / "keys")))

    def join(process: str, epoch: int) -> Bus:
        if process not in cluster.entries:
            cluster.add(len(cluster.entries), process)
        return cluster.join(process, epoch, bound)

    return join


def call(number: int, code: str = "1") -> CodeRequested:
    return CodeRequested(number, 0, "jupyter_code", code, "")


def lease_request(number: int) -> LeaseRequested:
    return LeaseRequested(number, 0, turn=0, lease=1, tokens=5, prompt_tokens=5, max_new_tokens=9)


async def send_calls(bus: Bus, to: str, count: int, first: int = 0, code: str = "1") -> None:
    for number in range(first, first + count):
        await bus.send(to, call(number, code))


async def receive_numbers(bus: Bus, count: int) -> list[int]:
    """Receive messages, and return the numbers of their trajectories."""
    return [(await bus.receive()).message.trajectory_id for _ in range(count)]  # pyright: ignore


async def until_acknowledged(bus: Bus) -> None:
    await wait_until(lambda: not bus.unacknowledged)


async def wait_until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - there is no event to wait for
        await asyncio.sleep(0.001)

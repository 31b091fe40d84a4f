"""Processes that speak to each other over any transport, under names that may be taken again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

import pytest

from bus.curve import load_key, make_key
from bus.in_process import Hub
from bus.messages import CodeRequested, LeaseRequested
from bus.transport import Bus
from bus.zeromq import zmq_bus
from tests.bus.clusters import Cluster

# In the last one every process is on a node of its own.
IN_TESTS = ("in_process", "zeromq", pytest.param("cluster", marks=pytest.mark.slow))


class Join(Protocol):
    def __call__(self, process: str, session: int = 0) -> Bus: ...


@asynccontextmanager
async def network(kind: str, folder: Path, bound: int = 1000) -> AsyncIterator[Join]:
    joined = list[Bus]()
    opened = _transport(kind, folder, bound)

    def join(process: str, session: int = 0) -> Bus:
        joined.append(opened(process, session))
        return joined[-1]

    yield join
    for bus in joined:
        await bus.close()


def _transport(kind: str, folder: Path, bound: int) -> Callable[[str, int], Bus]:
    if kind == "in_process":
        hub = Hub()
        return lambda process, session: hub.join(process, bound, session)
    if kind == "zeromq":
        return lambda process, session: zmq_bus(process, folder, bound, session)
    cluster = Cluster(folder, load_key(make_key(folder / "keys")))

    def join(process: str, session: int) -> Bus:
        if process not in cluster.entries:
            cluster.enter(len(cluster.entries), process)
        return cluster.join(process, session, bound)

    return join


def call(number: int, code: str = "1") -> CodeRequested:
    return CodeRequested(number, 0, "jupyter_code", code, "")


def lease_request(number: int) -> LeaseRequested:
    return LeaseRequested(number, 0, turn=0, lease=1, tokens=5, prompt_tokens=5, max_new_tokens=9)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - what moves tells nobody
        await asyncio.sleep(0.001)

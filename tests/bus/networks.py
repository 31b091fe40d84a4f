"""Processes that speak to each other over either transport, under names that may be taken again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

from bus.in_process import Hub
from bus.messages import CodeRequested, LeaseRequested
from bus.transport import Bus
from bus.zeromq import zmq_bus


class Join(Protocol):
    def __call__(self, process: str, session: int = 0) -> Bus: ...


@asynccontextmanager
async def network(kind: str, folder: Path, bound: int = 1000) -> AsyncIterator[Join]:
    hub, joined = Hub(), list[Bus]()

    def join(process: str, session: int = 0) -> Bus:
        bus = zmq_bus(process, folder, bound, session) if kind == "zeromq" else hub.join(process, bound, session)
        joined.append(bus)
        return bus

    yield join
    for bus in joined:
        await bus.close()


def call(number: int, code: str = "1") -> CodeRequested:
    return CodeRequested(number, 0, "jupyter_code", code, "")


def lease_request(number: int) -> LeaseRequested:
    return LeaseRequested(number, 0, turn=0, lease=1, tokens=5, prompt_tokens=5, max_new_tokens=9)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - what moves tells nobody
        await asyncio.sleep(0.001)

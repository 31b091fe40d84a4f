"""A deciding process starts and recovers, with its real log, bus and heartbeats."""

import asyncio
import shutil
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from asterism.actors.runtime.decider_process import ProcessIncarnation, decide_until_shutdown
from asterism.bus.messages import AnyMessage, BufferCursor, RunStarted, Shutdown
from asterism.bus.process.heartbeat import Heartbeat, receiving_heartbeats
from asterism.bus.transport.zeromq import make_zeromq_bus_factory
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.machines import SupervisionConfig
from asterism.configs.schema.run_config import RunConfig
from asterism.policies.decider import Send

EPOCH = 1 << 20
RUN = RunConfig(name="deciding", supervision=SupervisionConfig(heartbeat_s=0.01))
TIMEOUT_S = 30.0


class ShutdownDecider:
    """A decider that ends its process with its first decision, after waiting for `may_decide`."""

    def __init__(self, steps: list[str], may_decide: threading.Event) -> None:
        self._steps, self._may_decide = steps, may_decide

    def decide(self, now: float, event: AnyMessage) -> Sequence[Send]:
        assert self._may_decide.wait(TIMEOUT_S), "the event loop is blocked"
        self._steps.append("decided")
        return [Send("rollout-0", Shutdown())]

    def get_state_after(self, event: AnyMessage) -> msgspec.Struct | None:
        return None


class NullObserver:
    quiet = False

    def on_decision(self, now: float, event: AnyMessage, effects: Sequence[Send]) -> None:
        pass


async def run_incarnation(folder: RunFolder, number: int, steps: list[str], may_decide: threading.Event) -> None:
    async def background() -> None:
        steps.append("background")

    deciders = {"rollout-0": ShutdownDecider(steps, may_decide)}
    started = RunStarted(0, BufferCursor())
    incarnation = ProcessIncarnation("rollout-0", EPOCH, number)
    await decide_until_shutdown(
        incarnation,
        RUN,
        folder,
        deciders,
        started,
        {},
        NullObserver(),
        make_zeromq_bus_factory(RUN, folder),
        background,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    folder = RunFolder(tmp_path)
    folder.sockets.mkdir()
    yield folder
    shutil.rmtree(folder.sockets)


def test_heartbeats_continue_during_recovery(folder: RunFolder) -> None:
    """Heartbeats are sent although the decision blocks; the background task starts only after recovery."""
    steps, heartbeats, may_decide = list[str](), list[Heartbeat](), threading.Event()
    may_decide.set()
    asyncio.run(run_incarnation(folder, 1, steps, may_decide))
    assert sorted(steps) == ["background", "decided"]
    steps.clear()
    may_decide.clear()

    def on_heartbeat(heartbeat: Heartbeat) -> None:
        heartbeats.append(heartbeat)
        if len(heartbeats) == 3:
            may_decide.set()

    async def run_second() -> None:
        with receiving_heartbeats(folder.sockets, on_heartbeat):
            await run_incarnation(folder, 2, steps, may_decide)

    asyncio.run(run_second())
    assert steps == ["decided", "background"]
    assert {(heartbeat.process, heartbeat.incarnation, heartbeat.waiting) for heartbeat in heartbeats[:3]} == {
        ("rollout-0", 2, 0)
    }

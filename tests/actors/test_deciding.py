"""A process that decides, begun and gone on with: over its real log, bus and heartbeats."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from actors.deciding import Life, decide_until_shutdown
from bus.heartbeat import Heartbeat, listening
from bus.joining import over_zeromq
from bus.messages import AnyMessage, BufferCursor, RunStarted, Shutdown
from configs.run_folder import RunFolder
from configs.schema import Run, Supervision
from policies.decider import Send

SESSION = 1 << 20
RUN = Run(name="deciding", supervision=Supervision(heartbeat_s=0.01))
PATIENCE_S = 30.0


class Ending:
    """A decider that ends its process as soon as it begins. It is slow: it waits for a word first."""

    def __init__(self, told: list[str], may_decide: threading.Event) -> None:
        self._told, self._may_decide = told, may_decide

    def decide(self, now: float, event: AnyMessage) -> Sequence[Send]:
        assert self._may_decide.wait(PATIENCE_S), "its event loop stands still"
        self._told.append("decided")
        return [Send("rollout-0", Shutdown())]

    def state_after(self, event: AnyMessage) -> msgspec.Struct | None:
        return None


class Silent:
    quiet = False

    def saw(self, now: float, event: AnyMessage, effects: Sequence[Send]) -> None:
        pass


async def live(folder: RunFolder, number: int, told: list[str], may_decide: threading.Event) -> None:
    async def beside() -> None:
        told.append("beside")

    deciders = {"rollout-0": Ending(told, may_decide)}
    started = RunStarted(0, BufferCursor())
    life = Life("rollout-0", SESSION, number)
    await decide_until_shutdown(life, RUN, folder, deciders, started, {}, Silent(), over_zeromq(RUN, folder), beside)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    folder = RunFolder(tmp_path)
    folder.sockets.mkdir()
    yield folder
    shutil.rmtree(folder.sockets)


def test_while_it_decides_again_on_its_log_its_heart_beats(folder: RunFolder) -> None:
    """And what runs beside it has not begun."""
    told, beats, may_decide = list[str](), list[Heartbeat](), threading.Event()
    may_decide.set()
    asyncio.run(live(folder, 1, told, may_decide))
    assert sorted(told) == ["beside", "decided"]
    told.clear()
    may_decide.clear()

    def heard(beat: Heartbeat) -> None:
        beats.append(beat)
        if len(beats) == 3:
            may_decide.set()

    async def second_life() -> None:
        with listening(folder.sockets, heard):
            await live(folder, 2, told, may_decide)

    asyncio.run(second_life())
    assert told == ["decided", "beside"]
    assert {(beat.process, beat.life, beat.waiting) for beat in beats[:3]} == {("rollout-0", 2, 0)}

"""Heartbeats reach the launcher of the node, whoever listens or not, and take no number of any link."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

from bus.heartbeat import Heartbeat, beating, listening
from bus.in_process import Hub


def test_a_process_says_at_once_and_then_again_that_its_loop_turns(tmp_path: Path) -> None:
    async def scenario() -> list[Heartbeat]:
        heard = asyncio.Queue[Heartbeat]()
        bus = Hub().join("head", 10)
        with listening(tmp_path, heard.put_nowait):
            async with beating("head", 3, 0.01, tmp_path, lambda: bus):
                return [await heard.get() for _ in range(3)]

    heard = asyncio.run(scenario())
    assert {(beat.process, beat.life, beat.waiting, beat.unacknowledged, beat.dropped) for beat in heard} == {
        ("head", 3, 0, 0, 0)
    }


def test_who_is_not_heard_goes_on_and_what_is_no_heartbeat_is_dropped(tmp_path: Path) -> None:
    async def scenario() -> Heartbeat:
        heard = asyncio.Queue[Heartbeat]()
        async with beating("head", 1, 0.01, tmp_path, lambda: None):
            await asyncio.sleep(0.03)
            with listening(tmp_path, heard.put_nowait), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
                stranger.sendto(b"{", str(tmp_path / "heartbeats"))
                stranger.sendto(b"[1]", str(tmp_path / "heartbeats"))
                return await heard.get()

    assert asyncio.run(scenario()).process == "head"

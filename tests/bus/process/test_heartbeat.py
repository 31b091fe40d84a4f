"""Tests: a process sends heartbeats to the launcher of its node."""

import asyncio
import socket
from pathlib import Path

import pytest

from asterism.bus.process.heartbeat import (
    Heartbeat,
    receiving_heartbeats,
    sending_heartbeats,
    sending_heartbeats_from_thread,
)
from asterism.bus.transport.in_process import Hub

pytestmark = pytest.mark.real_clock


async def test_a_process_sends_heartbeats_immediately_and_periodically(tmp_path: Path) -> None:
    received = asyncio.Queue[Heartbeat]()
    bus = Hub().join("head", 10)
    with receiving_heartbeats(tmp_path, received.put_nowait):
        async with sending_heartbeats("head", 3, 0.01, tmp_path, lambda: bus):
            beats = [await received.get() for _ in range(3)]
    assert {(beat.process, beat.incarnation, beat.waiting, beat.unacknowledged, beat.dropped) for beat in beats} == {
        ("head", 3, 0, 0, 0)
    }


async def test_a_sender_needs_no_receiver_and_malformed_heartbeats_are_dropped(tmp_path: Path) -> None:
    received = asyncio.Queue[Heartbeat]()
    async with sending_heartbeats("head", 1, 0.01, tmp_path, lambda: None):
        await asyncio.sleep(0.03)
        with (
            receiving_heartbeats(tmp_path, received.put_nowait),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other,
        ):
            other.sendto(b"{", str(tmp_path / "heartbeats"))
            other.sendto(b"[1]", str(tmp_path / "heartbeats"))
            assert (await received.get()).process == "head"


async def test_a_thread_sends_heartbeats_while_the_main_thread_is_busy(tmp_path: Path) -> None:
    received = asyncio.Queue[Heartbeat]()
    with (
        receiving_heartbeats(tmp_path, received.put_nowait),
        sending_heartbeats_from_thread("learner rank 1", 3, 0.01, tmp_path),
    ):
        beats = [await received.get() for _ in range(3)]
    assert {(beat.process, beat.incarnation) for beat in beats} == {("learner rank 1", 3)}

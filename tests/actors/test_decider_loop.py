"""What a decider's loop does with frames that are for nobody, and when the log, or those that it sends to, are behind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from actors import decider_loop
from actors.decider_loop import DeciderLoop
from bus import event_log
from bus.codec import encode
from bus.event_log import EventLog, EventLogFailure
from bus.event_reading import read_events
from bus.in_process import Hub
from bus.messages import AnyMessage, Envelope, LeaseReleased, Shutdown
from policies.decider import Send


class Echo:
    """Sends what it hears to the peer."""

    def decide(self, now: float, event: AnyMessage) -> Sequence[Send]:
        return [Send("peer", event)]

    def state_after(self, event: AnyMessage) -> None:
        return None


def released(number: int) -> LeaseReleased:
    return LeaseReleased(number, 1)


def test_what_is_no_message_and_what_is_for_nobody_is_said_and_acknowledged() -> None:
    async def scenario() -> None:
        hub = Hub()
        head, peer = hub.join("head", 100), hub.join("peer", 100)
        loop = asyncio.create_task(DeciderLoop(head, None, {"echo": Echo()}, {}, lambda: 0.0).run())
        await peer.send_frame("head", b"\xc1 no message")
        await peer.send("head/nobody", released(1))
        await peer.send("head/echo", released(2))
        assert (await peer.receive()).message == released(2)
        await peer.send("head", Shutdown())
        await loop
        assert peer.unacknowledged.get("head", 0) == 0

    with capture_logs() as said:
        asyncio.run(scenario())
    assert [entry["event"] for entry in said] == ["frame.dropped", "message.misdirected"]
    assert said[0]["num_bytes"] == len(b"\xc1 no message")
    assert (said[1]["to"], said[1]["kind"]) == ("head/nobody", "LeaseReleased")


def test_no_more_is_decided_on_than_may_wait_for_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All arrive at once, and are decided and acted on in their order however often the loop has to wait."""
    monkeypatch.setattr(decider_loop, "ACTS", 4)
    most = 0

    class Watched(DeciderLoop):
        async def _until_acted(self, left: int) -> None:
            nonlocal most
            most = max(most, len(self._acts))
            await super()._until_acted(left)

    async def scenario() -> None:
        hub = Hub()
        head, peer = hub.join("head", 1000), hub.join("peer", 1000)
        log = EventLog(tmp_path / "head.sqlite")
        for number in range(100):
            await peer.send("head/echo", released(number))
        await peer.send("head", Shutdown())
        await Watched(head, log, {"echo": Echo()}, {}, lambda: 0.0).run()
        log.close()
        assert [(await peer.receive()).message for _ in range(100)] == [released(number) for number in range(100)]

    asyncio.run(scenario())
    assert most == 5


def test_a_log_that_is_behind_holds_up_what_is_received(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = threading.Semaphore(0)
    next_group, wait_for_room = EventLog._next_group, EventLog.wait_for_room  # pyright: ignore[reportPrivateUsage]

    def write_on(log: EventLog) -> None:
        groups.release(1000)
        wait_for_room(log)

    monkeypatch.setattr(EventLog, "_next_group", lambda log: groups.acquire() and next_group(log))
    monkeypatch.setattr(EventLog, "wait_for_room", write_on)
    monkeypatch.setattr(event_log, "BOUND", 3)

    async def scenario() -> None:
        hub = Hub()
        head, peer = hub.join("head", 1000), hub.join("peer", 1000)
        log = EventLog(tmp_path / "head.sqlite")
        for number in range(50):
            await peer.send("head/echo", released(number))
        await peer.send("head", Shutdown())
        await DeciderLoop(head, log, {"echo": Echo()}, {}, lambda: 0.0).run()
        log.close()

    with capture_logs() as said:
        asyncio.run(scenario())
    assert {entry["event"] for entry in said} == {"event_log.filled"}
    assert sum(1 for _ in read_events(tmp_path / "head.sqlite")) == 50


def test_a_log_that_cannot_be_written_ends_it_and_nothing_of_the_event_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        hub = Hub()
        head, peer = hub.join("head", 100), hub.join("peer", 100)
        log = EventLog(tmp_path / "head.sqlite")
        frame = encode(Envelope("peer", "head/echo", LeaseReleased(1 << 63, 1)))  # a number that no column holds
        await peer.send_frame("head", frame)
        with pytest.raises(EventLogFailure, match="too large"):
            await DeciderLoop(head, log, {"echo": Echo()}, {}, lambda: 0.0).run()
        with pytest.raises(EventLogFailure):
            log.close()
        assert peer.waiting == 0
        assert peer.unacknowledged["head"] == 1

    asyncio.run(asyncio.wait_for(scenario(), 30))

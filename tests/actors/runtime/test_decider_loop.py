"""The decider loop handles undeliverable frames, back-pressure of the log, write errors, and the clock."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from asterism.actors.runtime import decider_loop
from asterism.actors.runtime.decider_loop import DeciderLoop, make_steady_clock
from asterism.bus.bus import Bus
from asterism.bus.codec import encode
from asterism.bus.event_log import writer as event_log
from asterism.bus.event_log.reader import read_events
from asterism.bus.event_log.writer import EventLog, EventLogFailure
from asterism.bus.messages import AnyMessage, Envelope, LeaseReleased, Shutdown
from asterism.bus.transport.in_process import Hub
from asterism.policies.decider import Send

pytestmark = [pytest.mark.real_clock, pytest.mark.timeout(30)]


class Echo:
    """A decider that forwards every message to the peer."""

    def decide(self, now: float, event: AnyMessage) -> Sequence[Send]:
        return [Send("peer", event)]

    def get_state_after(self, event: AnyMessage) -> None:
        return None


def released(number: int) -> LeaseReleased:
    return LeaseReleased(number, 1)


@pytest.fixture
@asynccontextmanager
async def buses() -> AsyncIterator[tuple[Bus, Bus]]:
    """Yield the buses of the deciding process and of its peer."""
    hub = Hub()
    yield hub.join("head", 1000), hub.join("peer", 1000)


async def decide_releases(
    log_path: Path, buses: tuple[Bus, Bus], count: int, loop: type[DeciderLoop] = DeciderLoop
) -> None:
    """Decide on messages that all arrive before the loop starts."""
    head, peer = buses
    log = EventLog(log_path)
    for number in range(count):
        await peer.send("head/echo", released(number))
    await peer.send("head", Shutdown())
    await loop(head, log, {"echo": Echo()}, {}, lambda: 0.0).run()
    log.close()


async def test_malformed_and_misdirected_frames_are_logged_and_acknowledged(buses: tuple[Bus, Bus]) -> None:
    head, peer = buses
    with capture_logs() as logged:
        loop = asyncio.create_task(DeciderLoop(head, None, {"echo": Echo()}, {}, lambda: 0.0).run())
        await peer.send_frame("head", b"\xc1 no message")
        await peer.send("head/unknown", released(1))
        await peer.send("head/echo", released(2))
        assert (await peer.receive()).message == released(2)
        await peer.send("head", Shutdown())
        await loop
    assert peer.unacknowledged.get("head", 0) == 0
    assert [entry["event"] for entry in logged] == ["frame.dropped", "message.misdirected"]
    assert logged[0]["num_bytes"] == len(b"\xc1 no message")
    assert (logged[1]["to"], logged[1]["kind"]) == ("head/unknown", "LeaseReleased")


async def test_the_loop_stops_receiving_when_too_many_events_wait_for_the_log(
    tmp_path: Path, buses: tuple[Bus, Bus], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All events arrive together. Decisions and effects keep their order, however often the loop waits."""
    monkeypatch.setattr(decider_loop, "MAX_PENDING_EFFECTS", 4)
    max_pending = 0

    class Watched(DeciderLoop):
        async def _wait_for_effects(self, limit: int) -> None:
            nonlocal max_pending
            max_pending = max(max_pending, len(self._pending_effects))
            await super()._wait_for_effects(limit)

    await decide_releases(tmp_path / "head.sqlite", buses, 100, Watched)
    _, peer = buses
    assert [(await peer.receive()).message for _ in range(100)] == [released(number) for number in range(100)]
    assert max_pending == 5


async def test_the_loop_stops_receiving_while_the_log_is_full(
    tmp_path: Path, buses: tuple[Bus, Bus], monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = threading.Semaphore(0)
    collect_group, wait_for_space = EventLog._collect_group, EventLog.wait_for_space  # pyright: ignore[reportPrivateUsage]

    def resume_writing(log: EventLog) -> None:
        groups.release(1000)
        wait_for_space(log)

    monkeypatch.setattr(EventLog, "_collect_group", lambda log: groups.acquire() and collect_group(log))
    monkeypatch.setattr(EventLog, "wait_for_space", resume_writing)
    monkeypatch.setattr(event_log, "MAX_QUEUED_RECORDS", 3)

    with capture_logs() as logged:
        await decide_releases(tmp_path / "head.sqlite", buses, 50)
    assert {entry["event"] for entry in logged} == {"event_log.filled"}
    assert sum(1 for _ in read_events(tmp_path / "head.sqlite")) == 50


async def test_a_log_write_error_ends_the_loop_and_no_effect_leaves(tmp_path: Path, buses: tuple[Bus, Bus]) -> None:
    head, peer = buses
    log = EventLog(tmp_path / "head.sqlite")
    frame = encode(Envelope("peer", "head/echo", LeaseReleased(1 << 63, 1)))  # the id does not fit into the column
    await peer.send_frame("head", frame)
    with pytest.raises(EventLogFailure, match="too large"):
        await DeciderLoop(head, log, {"echo": Echo()}, {}, lambda: 0.0).run()
    with pytest.raises(EventLogFailure):
        log.close()
    assert peer.waiting == 0
    assert peer.unacknowledged["head"] == 1


def test_setting_the_system_clock_does_not_change_a_running_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = make_steady_clock()
    before = clock()
    monkeypatch.setattr(time, "time", lambda: 5.0)
    assert before <= clock() < before + 60.0


def test_a_later_incarnation_starts_after_the_times_in_its_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 5.0)
    assert make_steady_clock(not_before=1e9)() >= 1e9
    assert make_steady_clock()() < 1e6

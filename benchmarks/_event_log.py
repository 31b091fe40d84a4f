"""What the event log takes: how many events a second it commits, and how long one trajectory's story takes among many."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from actors.log_commands import story_lines
from bus.codec import encode
from bus.event_log import EventLog
from bus.messages import Envelope, LeaseRequested, StartGroup
from configs.run_folder import RunFolder
from configs.schema import Dialogue

EVENTS_OF_EACH = 50  # trajectory
_GROUP = 32  # trajectories
_TIMES = 5


class NoText:
    """A tokenizer for stories without texts."""

    def encode(self, text: str, *, trusted: bool) -> list[int]:
        raise NotImplementedError

    def decode(self, token_ids: Sequence[int]) -> str:
        raise NotImplementedError


def write_log(folder: RunFolder, events: int) -> float:
    """Events a second, until all are committed. A group's start is logged before its trajectories' events."""
    folder.events.mkdir(parents=True, exist_ok=True)
    trajectories = max(_GROUP, events // EVENTS_OF_EACH)
    began = time.perf_counter()
    log = EventLog(folder.events / "rollout-0.sqlite")
    for group in range(trajectories // _GROUP):
        start = StartGroup(group, "train", "q", "2", bytes(256), _GROUP, _GROUP * group, 1.0, 5)
        log.append(0.0, "rollout-0", "head/buffer", "StartGroup", None, encode(Envelope("head", "rollout-0", start)))
    for number in range(events):
        trajectory = number % trajectories
        request = LeaseRequested(trajectory, trajectory // _GROUP, number // trajectories, 1, 500, 64, 9000)
        frame = encode(Envelope("rollout-0", "head/arbiter", request))
        log.append(1e-3 * number, "rollout-0", "rollout-0", "LeaseRequested", trajectory, frame)
        log.decided(number + 1, b"12345678", None)
        if log.full:
            log.wait_for_room()
    log.close()
    return events / (time.perf_counter() - began)


def story_ms(folder: RunFolder, events: int) -> float:
    """The median of a few, the opening of the log included."""
    trajectories = max(_GROUP, events // EVENTS_OF_EACH)
    took: list[float] = []
    for time_ in range(_TIMES):
        began = time.perf_counter()
        lines = story_lines(folder, (time_ * 997) % trajectories, NoText(), Dialogue())
        took.append(1000 * (time.perf_counter() - began))
        assert len(lines) >= events // trajectories
    return median(took)


def log_figures(path: Path, events: int) -> dict[str, float]:
    folder = RunFolder(path)
    rate = write_log(folder, events)
    return {"log_events_per_s": rate, "story_ms_1m_events": story_ms(folder, events)}

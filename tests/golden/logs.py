"""Logs of bugs that simulated runs have found, as text: a line about the log, then a line for each event, in their order.

`python -m tests.golden.logs SEED PROCESS COUNT NAME` keeps the first events of a process in that seed's run.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from bus.codec import decode, encode
from bus.event_log import Event
from bus.messages import Envelope
from configs.schema import Run
from tests.simulation.campaign import play, world_of

FOLDER = Path(__file__).parent


class Found(msgspec.Struct, frozen=True):
    """What the log is of."""

    seed: int
    process: str
    run: Run


class Line(msgspec.Struct, frozen=True, array_like=True):
    time: float
    actor: str
    session: int  # of the sender
    number: int
    envelope: Envelope


def read(name: str) -> tuple[Found, list[Event]]:
    first, *lines = (FOLDER / f"{name}.jsonl").read_bytes().splitlines()
    return msgspec.json.decode(first, type=Found), [_event(seq, line) for seq, line in enumerate(lines, 1)]


def _event(seq: int, data: bytes) -> Event:
    line = msgspec.json.decode(data, type=Line)
    message, sender = line.envelope.message, line.envelope.sender
    kind, trajectory = type(message).__name__, getattr(message, "trajectory_id", None)
    frame = encode(line.envelope)
    return Event(seq, line.time, line.actor, sender, line.session, line.number, kind, trajectory, frame)


def write(name: str, found: Found, events: Sequence[Event]) -> None:
    lines: list[object] = [found]
    lines += [Line(each.time, each.actor, each.session, each.number, decode(each.frame)) for each in events]
    (FOLDER / f"{name}.jsonl").write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))


def main(seed: int, process: str, count: int, name: str) -> None:
    world = play(world_of(seed))
    write(name, Found(seed, process, world.run), world.logs[process].events[:count])


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4])

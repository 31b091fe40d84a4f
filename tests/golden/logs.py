"""Logs of bugs that simulated runs have found, as text: a line about the log, then a line for each event, in their order.

`python -m tests.golden.logs WORLD SEED PROCESS NAME [--first N] [--last N]` keeps events of a process in that seed's run.
Of head and rollout they are those of its event log; of the others, which have none, what came over all their lives.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import msgspec

from bus.codec import decode, encode
from bus.event_log import Event
from bus.messages import Envelope
from configs.schema import Evaluation, Rl, Run
from tests.simulation import nightly
from tests.simulation.campaign import RUN, play
from tests.simulation.world import Faults, World

FOLDER = Path(__file__).parent


def parted(seed: int) -> World:
    """A short run of small steps, of which most of what they start is left over and stopped, while two are parted all the
    time."""
    rl = Rl(steps=3, prompts=1, rollouts=2, refills=1, oversubscribe=3.0)
    run = msgspec.structs.replace(RUN, rl=rl, evaluation=Evaluation(0))
    return World(run, seed, trouble=0.03, faults=Faults(partitions=2.0, executor_deaths=0.03))


WORLDS = {**nightly.WORLDS, "parted": parted}


class Found(msgspec.Struct, frozen=True):
    """What the log is of."""

    seed: int
    process: str
    run: Run
    world: str = "faults"


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


def world_again(run: Run) -> World:
    """What the run's processes were made with; nobody lives in it."""
    return World(run, seed=0, trouble=0.0)


def lines_of(world: World, process: str) -> list[Line]:
    if process in world.logs:
        logged = world.logs[process].events
        return [Line(each.time, each.actor, each.session, each.number, decode(each.frame)) for each in logged]
    came = [heard for (who, _), life in world.network.heard.items() if who == process for heard in life]
    return [Line(at, process, one.session, one.number, decode(one.frame)) for at, one in came]


def write(name: str, found: Found, lines: Sequence[Line]) -> None:
    encoded = [msgspec.json.encode(found), *(msgspec.json.encode(line) for line in lines)]
    (FOLDER / f"{name}.jsonl").write_bytes(b"".join(line + b"\n" for line in encoded))


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests.golden.logs", description=__doc__)
    parser.add_argument("world", choices=WORLDS)
    parser.add_argument("seed", type=int)
    parser.add_argument("process")
    parser.add_argument("name")
    parser.add_argument("--first", type=int, default=1, help="number of the first event that is kept")
    parser.add_argument("--last", type=int, help="number of the last one; without it all that follow are kept")
    asked = parser.parse_args()
    world = play(WORLDS[asked.world](asked.seed))
    lines = lines_of(world, asked.process)[asked.first - 1 : asked.last]
    write(asked.name, Found(asked.seed, asked.process, world.run, asked.world), lines)


if __name__ == "__main__":
    main()

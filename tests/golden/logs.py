"""Reads and writes logs of bugs that simulated runs have found: a line about the source, then a line per event.

`python -m tests.golden.logs WORLD SEED PROCESS NAME [--first N] [--last N]` writes the events of a process in that seed's
run: the event log of head or rollout, or all messages that another process received over its incarnations.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import msgspec

from asterism.bus.codec import decode, encode
from asterism.bus.event_log.records import Event
from asterism.bus.messages import Envelope
from asterism.configs.schema.algorithm import EvaluationConfig, RlConfig
from asterism.configs.schema.run_config import RunConfig
from tests.simulation import nightly
from tests.simulation.campaign import RUN, play
from tests.simulation.world import Faults, World

FOLDER = Path(__file__).parent


def partitioned(seed: int) -> World:
    """Build a short run under continuous partitions, with small steps and many aborted surplus groups."""
    rl = RlConfig(steps=3, prompts=1, rollouts=2, max_refill_groups=1, group_oversampling=3.0)
    run = msgspec.structs.replace(RUN, rl=rl, evaluation=EvaluationConfig(0))
    return World(run, seed, failure_rate=0.03, faults=Faults(partitions=2.0, executor_deaths=0.03))


WORLDS = {**nightly.WORLDS, "partitioned": partitioned}


class Source(msgspec.Struct, frozen=True):
    """The simulated run and the process that a log is from."""

    seed: int
    process: str
    run: RunConfig
    world: str = "faults"


class Line(msgspec.Struct, frozen=True, array_like=True):
    time: float
    actor: str
    epoch: int  # epoch of the sender
    number: int
    envelope: Envelope


def read(name: str) -> tuple[Source, list[Event]]:
    first, *lines = (FOLDER / f"{name}.jsonl").read_bytes().splitlines()
    return msgspec.json.decode(first, type=Source), [_event(seq, line) for seq, line in enumerate(lines, 1)]


def _event(seq: int, data: bytes) -> Event:
    line = msgspec.json.decode(data, type=Line)
    message, sender = line.envelope.message, line.envelope.sender
    kind, trajectory = type(message).__name__, getattr(message, "trajectory_id", None)
    frame = encode(line.envelope)
    return Event(seq, line.time, line.actor, sender, line.epoch, line.number, kind, trajectory, frame)


def rebuild_world(run: RunConfig) -> World:
    """Build a world with the run's settings, for its deciders and rules. The world runs no processes."""
    return World(run, seed=0, failure_rate=0.0)


def list_lines(world: World, process: str) -> list[Line]:
    if process in world.logs:
        logged = world.logs[process].events
        return [Line(each.time, each.actor, each.epoch, each.number, decode(each.frame)) for each in logged]
    received = [pair for (who, _), pairs in world.network.received.items() if who == process for pair in pairs]
    return [Line(at, process, one.epoch, one.number, decode(one.frame)) for at, one in received]


def write(name: str, source: Source, lines: Sequence[Line]) -> None:
    encoded = [msgspec.json.encode(source), *(msgspec.json.encode(line) for line in lines)]
    (FOLDER / f"{name}.jsonl").write_bytes(b"".join(line + b"\n" for line in encoded))


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests.golden.logs", description=__doc__)
    parser.add_argument("world", choices=WORLDS)
    parser.add_argument("seed", type=int)
    parser.add_argument("process")
    parser.add_argument("name")
    parser.add_argument("--first", type=int, default=1, help="number of the first event to write")
    parser.add_argument("--last", type=int, help="number of the last event to write (default: the last one)")
    arguments = parser.parse_args()
    world = play(WORLDS[arguments.world](arguments.seed))
    lines = list_lines(world, arguments.process)[arguments.first - 1 : arguments.last]
    write(arguments.name, Source(arguments.seed, arguments.process, world.run, arguments.world), lines)


if __name__ == "__main__":
    main()

"""A whole head process replays the log of a bug about frame numbers after a recovery."""

import asyncio
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from asterism.actors.runtime.decider_process import ProcessIncarnation, decide_until_shutdown
from asterism.actors.runtime.wiring import list_generators
from asterism.bus.addresses import HEAD, LAUNCHER, LEARNER, ROLLOUT
from asterism.bus.event_log.records import Event
from asterism.bus.lanes import select_lane
from asterism.bus.messages import AnyMessage, BufferCursor, RunFinished, RunStarted, Shutdown
from asterism.bus.process.heartbeat import Heartbeat, receiving_heartbeats
from asterism.bus.transport.in_process import Hub, make_in_process_bus_factory
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.machines import SupervisionConfig
from asterism.configs.schema.run_config import RunConfig
from tests.actors.runtime.test_decider_process import NullObserver
from tests.golden.logs import read, rebuild_world
from tests.golden.test_golden_logs import write_log

TIMEOUT_S = 30.0
FREQUENT, RARE = (
    SupervisionConfig(heartbeat_s=0.01),
    SupervisionConfig(heartbeat_s=3600.0, heartbeat_timeout_s=36_000.0, first_heartbeat_timeout_s=36_000.0),
)
NUM_HEARTBEATS = 2  # heartbeats of the first incarnation after the replay; the second incarnation sends fewer
NUM_FRAMES_BEFORE = 44  # frames that the head sent to the launcher before RunFinished in the simulated run


async def run_head(run: RunConfig, folder: RunFolder, hub: Hub, incarnation: ProcessIncarnation) -> None:
    async def ignore(message: AnyMessage) -> None:
        pass

    deciders, started = rebuild_world(run).deciders()[HEAD], RunStarted(0, BufferCursor())
    join = make_in_process_bus_factory(run, hub)
    await decide_until_shutdown(incarnation, run, folder, deciders, started, {"metrics": ignore}, NullObserver(), join)


async def run_head_twice(run: RunConfig, folder: RunFolder, events: Sequence[Event], last: Sequence[Event]) -> None:
    """Run two incarnations until the launcher receives RunFinished. The log has `events`; `last` arrive later."""
    hub, heartbeats, epoch = Hub(), asyncio.Queue[Heartbeat](), events[0].epoch
    launcher, rollout = hub.join(LAUNCHER, 100), hub.join(ROLLOUT, 100, last[0].epoch)
    for name in (LEARNER, *list_generators(run)):
        hub.join(name, 100)
    rollout.restore({(HEAD, select_lane(last[0].kind)): (last[0].number, ())}, {})
    with receiving_heartbeats(folder.sockets, heartbeats.put_nowait):
        first = asyncio.create_task(
            run_head(replace(run, supervision=FREQUENT), folder, hub, ProcessIncarnation(HEAD, epoch, 1))
        )
        for _ in range(NUM_FRAMES_BEFORE):
            await launcher.receive()
        while not heartbeats.empty():
            heartbeats.get_nowait()
        for _ in range(NUM_HEARTBEATS):
            await heartbeats.get()
        first.cancel()
        await asyncio.wait([first])
        second = asyncio.create_task(
            run_head(replace(run, supervision=RARE), folder, hub, ProcessIncarnation(HEAD, epoch, 2))
        )
        for event in last:
            await rollout.send_frame(HEAD, event.frame)
        while not isinstance((await launcher.receive()).message, RunFinished):
            pass
        await launcher.send(HEAD, Shutdown())
        await second


@pytest.mark.slow
def test_the_launcher_receives_run_finished_from_a_recovered_head(tmp_path: Path) -> None:
    """If an unlogged frame took the number of RunFinished, the launcher would drop RunFinished as a duplicate."""
    source, events = read("trajectories_aborted_at_the_end")
    last = [event for event in events if event.kind == "TrajectoryAborted"][-2:]
    events = events[: last[0].seq - 1]
    folder = RunFolder(tmp_path)
    folder.sockets.mkdir()
    write_log(folder, HEAD, events)
    try:
        asyncio.run(asyncio.wait_for(run_head_twice(source.run, folder, events, last), TIMEOUT_S))
    finally:
        shutil.rmtree(folder.sockets)

"""The log of a bug about what a process says in its next life, read again by the whole process."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from actors.deciding import Life, decide_until_shutdown
from actors.wiring import HEAD, LAUNCHER, LEARNER, ROLLOUT, generators
from bus.event_log import Event, EventLog
from bus.heartbeat import Heartbeat, listening
from bus.in_process import Hub
from bus.joining import in_process
from bus.lanes import lane_of
from bus.messages import AnyMessage, BufferCursor, RunFinished, RunStarted, Shutdown
from configs.run_folder import RunFolder
from configs.schema import Run, Supervision
from policies.decider import Send
from tests.golden.logs import read, world_again

PATIENCE_S = 30.0
OFTEN, SELDOM = Supervision(heartbeat_s=0.01), Supervision(heartbeat_s=3600.0, silent_s=36_000.0, start_s=36_000.0)
BEATS = 2  # of the first life, when it has said what its log says: the second one has no time for so many
SAID_BEFORE = 44  # frames from the head to the launcher before RunFinished, in the simulated run


class Silent:
    quiet = False

    def saw(self, now: float, event: AnyMessage, effects: Sequence[Send]) -> None:
        pass


async def live(run: Run, folder: RunFolder, hub: Hub, life: Life) -> None:
    async def note(message: AnyMessage) -> None:
        pass

    deciders, begun = world_again(run).deciders()[HEAD], RunStarted(0, BufferCursor())
    join = in_process(run, hub)
    await decide_until_shutdown(life, run, folder, deciders, begun, {"metrics": note}, Silent(), join)


async def live_twice(run: Run, folder: RunFolder, events: Sequence[Event], last: Sequence[Event]) -> None:
    """Until the launcher has heard that the run is finished. The log of `folder` has `events`; `last` come after them."""
    hub, beats, session = Hub(), asyncio.Queue[Heartbeat](), events[0].session
    launcher, rollout = hub.join(LAUNCHER, 100), hub.join(ROLLOUT, 100, last[0].session)
    for name in (LEARNER, *generators(run)):
        hub.join(name, 100)
    rollout.restore({(HEAD, lane_of(last[0].kind)): (last[0].number, ())}, {})
    with listening(folder.sockets, beats.put_nowait):
        first = asyncio.create_task(live(replace(run, supervision=OFTEN), folder, hub, Life(HEAD, session, 1)))
        for _ in range(SAID_BEFORE):
            await launcher.receive()
        while not beats.empty():
            beats.get_nowait()
        for _ in range(BEATS):
            await beats.get()
        first.cancel()
        await asyncio.wait([first])
        second = asyncio.create_task(live(replace(run, supervision=SELDOM), folder, hub, Life(HEAD, session, 2)))
        for event in last:
            await rollout.send_frame(HEAD, event.frame)
        while not isinstance((await launcher.receive()).message, RunFinished):
            pass
        await launcher.send(HEAD, Shutdown())
        await second


def test_a_head_that_is_killed_after_a_heartbeat_is_heard_when_the_run_is_finished(tmp_path: Path) -> None:
    """The last two trajectories are yet to end when it is killed. What it said beyond its log would have taken a number that
    its next life gives to RunFinished, which the launcher would drop as known."""
    found, events = read("trajectories_that_are_stopped_at_the_end")
    last = [event for event in events if event.kind == "TrajectoryAborted"][-2:]
    events = events[: last[0].seq - 1]
    folder = RunFolder(tmp_path)
    folder.sockets.mkdir()
    log = EventLog(folder.events / f"{HEAD}.sqlite")
    for each in events:
        where = (each.time, each.actor, each.sender, each.kind, each.trajectory)
        log.append(*where, each.frame, session=each.session, number=each.number)
    log.close()
    try:
        asyncio.run(asyncio.wait_for(live_twice(found.run, folder, events, last), PATIENCE_S))
    finally:
        shutil.rmtree(folder.sockets)

"""`asterism log waits` while the learner waits for GPU memory of the engines."""

from pathlib import Path

import pytest

from actors.cli.log import waits_command
from bus.addresses import HEAD, ROLLOUT
from bus.codec import encode
from bus.event_log.writer import EventLog
from bus.messages import (
    AnyMessage,
    BufferCursor,
    EngineAsleep,
    EngineSleepRequested,
    Envelope,
    GpuMemoryRequested,
    RunStarted,
)
from configs.run_folder import RunFolder
from tests.golden.logs import rebuild_world
from tests.simulation.campaign import RUN


def write_log(folder: RunFolder, process: str, actor: str, *messages: AnyMessage) -> None:
    """Writes an event log with one message per second."""
    folder.events.mkdir(parents=True, exist_ok=True)
    log = EventLog(folder.events / f"{process}.sqlite")
    for at, message in enumerate(messages, 1):
        log.append(at, actor, "x", type(message).__name__, None, encode(Envelope("x", f"{process}/{actor}", message)))
    log.close()


def test_the_learner_waits_until_all_engines_release_their_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        waits_command,
        "build_deciders",
        lambda process, run, _: rebuild_world(run).deciders()[process],  # pyright: ignore
    )
    folder, wanted = RunFolder(tmp_path), GpuMemoryRequested(1, -1)
    asleep = EngineAsleep("generator-0", 1, EngineSleepRequested(1, -1))
    write_log(folder, ROLLOUT, ROLLOUT, RunStarted(0, BufferCursor()))
    write_log(folder, HEAD, "recipe", RunStarted(0, BufferCursor()), wanted, asleep)
    waits = [wait for wait in waits_command.find_waits(RUN, folder) if wait.waiter == "learner"]
    assert waits == [waits_command.PendingWait("learner", "generator-1", "the release of its GPU memory", 2.0)]

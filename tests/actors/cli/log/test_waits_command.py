"""`asterism log waits` reports a learner that waits for GPU memory of the engines."""

from pathlib import Path

import pytest

from asterism.actors.cli.log import waits_command
from asterism.bus import messages as msg
from asterism.bus.addresses import HEAD, ROLLOUT
from asterism.bus.codec import encode
from asterism.bus.event_log.writer import EventLog
from asterism.configs.run_folder import RunFolder
from tests.golden.logs import rebuild_world
from tests.simulation.campaign import RUN


def write_log(folder: RunFolder, process: str, actor: str, *messages: msg.AnyMessage) -> None:
    """Write an event log with one message per second."""
    folder.events.mkdir(parents=True, exist_ok=True)
    log = EventLog(folder.events / f"{process}.sqlite")
    for at, message in enumerate(messages, 1):
        frame = encode(msg.Envelope("x", f"{process}/{actor}", message))
        log.append(float(at), actor, "x", type(message).__name__, None, frame)
    log.close()


def test_the_learner_waits_until_all_engines_release_their_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        waits_command,
        "build_deciders",
        lambda process, run, _: rebuild_world(run).deciders()[process],  # pyright: ignore
    )
    folder, wanted = RunFolder(tmp_path), msg.GpuMemoryRequested(1, -1)
    asleep = msg.EngineAsleep("generator-0", 1, msg.EngineSleepRequested(1, -1))
    write_log(folder, ROLLOUT, ROLLOUT, msg.RunStarted(0, msg.BufferCursor()))
    write_log(folder, HEAD, "recipe", msg.RunStarted(0, msg.BufferCursor()), wanted, asleep)
    waits = [wait for wait in waits_command.find_waits(RUN, folder) if wait.waiter == "learner"]
    assert waits == [waits_command.PendingWait("learner", "generator-1", "the release of its GPU memory", 2.0)]


def test_the_logs_of_a_finished_run_are_not_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The replay of a long run takes a minute. A later launch that has not ended is replayed."""
    replayed: list[Path] = []

    def find_waits(_run: object, folder: RunFolder) -> list[waits_command.PendingWait]:
        replayed.append(folder.path)
        return []

    monkeypatch.setattr(waits_command, "find_waits", find_waits)
    monkeypatch.setattr(waits_command, "load_run", lambda _: RUN)  # pyright: ignore
    start, finished = msg.RunStarted(0, msg.BufferCursor()), msg.RunFinished(1)
    for name, messages in (("whole", [start, finished]), ("resumed", [start, finished, start])):
        write_log(RunFolder(tmp_path / name), HEAD, "recipe", *messages)
        waits_command.print_waits(RunFolder(tmp_path / name))
    assert replayed == [tmp_path / "resumed"]
    assert [line.split(" at ")[0] for line in capsys.readouterr().out.splitlines()] == [
        "no actor waits; the run ended",
        "no actor waits; the run started",
    ]

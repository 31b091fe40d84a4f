"""A launch can end before its processes start, or because of a write error of its log."""

import asyncio
import errno
import os
import signal
import sys
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from asterism.actors.launch.child_processes import ProcessDied
from asterism.actors.launch.command_lines import CommandLines
from asterism.actors.launch.launcher import Launcher, LogWriteFailure, RunEnding, TrainingStopped
from asterism.actors.runtime import wiring
from asterism.bus.addresses import HEAD, LAUNCHER
from asterism.bus.messages import HealthReported, RunFailed
from asterism.bus.transport.in_process import Hub
from asterism.configs.atomic_write import DiskError
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.run_config import PrepareConfig, RunConfig
from tests.processes import family
from tests.simulation.processes import RecordedDisplay


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    folder = RunFolder(tmp_path / "run")
    for path in (folder.path, folder.logs, folder.sockets):
        path.mkdir()
    yield folder
    for path in folder.sockets.iterdir():
        path.unlink()
    folder.sockets.rmdir()


def launch(folder: RunFolder, code: str, monkeypatch: pytest.MonkeyPatch) -> Coroutine[Any, Any, RunEnding]:
    """Return a launch with `code` as its first process."""
    run = RunConfig(name="run", prepare=PrepareConfig(import_path="asterism.tasks.tiny.prepare:TinyDemo"))
    monkeypatch.setattr(CommandLines, "build_prepare_argv", lambda commands: [sys.executable, "-c", code])
    return Launcher(run, folder, RecordedDisplay(), launch=1, log_failure=LogWriteFailure()).launch()


@pytest.mark.slow
@pytest.mark.real_clock
async def test_an_error_of_the_preparation_ends_the_run(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(family(os.getpid()))
    with pytest.raises(ProcessDied, match=r"(?s)^preparing failed:\n.*no room for a tokenizer$"):
        await launch(folder, "raise SystemExit('no room for a tokenizer')", monkeypatch)
    assert set(family(os.getpid())) <= before


@pytest.mark.slow
@pytest.mark.real_clock
async def test_an_interrupt_during_task_preparation_ends_the_run_without_leftovers(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wiring, "STOP_TIMEOUT_S", 0.05)
    before, output = set(family(os.getpid())), folder.logs / "prepare.out"
    program = "import signal; print('here', flush=True); signal.pause()"
    with capture_logs() as logged:
        launching = asyncio.create_task(launch(folder, program, monkeypatch))
        while not (output.exists() and "here" in output.read_text()):  # noqa: ASYNC110 - output has no event
            await asyncio.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)
        assert await launching == "interrupted"
    assert [entry["event"] for entry in logged] == ["process.started", "process.killed", "processes.stopped"]
    assert set(family(os.getpid())) <= before


async def test_early_and_late_waiters_receive_the_first_write_error_of_the_log() -> None:
    failure = LogWriteFailure()
    early = asyncio.create_task(failure.wait())
    await asyncio.sleep(0)
    assert not early.done()
    failure.record(DiskError("logs/launcher.jsonl", errno.ENOSPC))
    failure.record(DiskError("logs/launcher.jsonl", errno.EROFS))
    for waiting in (early, failure.wait()):
        with pytest.raises(DiskError, match=r"^logs/launcher\.jsonl: No space left on device$"):
            await waiting


async def test_health_reports_are_shown_and_logged_and_a_stop_ends_the_run(folder: RunFolder) -> None:
    hub, display = Hub(), RecordedDisplay()
    bus, head = hub.join(LAUNCHER, 10), hub.join(HEAD, 10)
    launcher = Launcher(RunConfig(name="run"), folder, display, launch=1, log_failure=LogWriteFailure())
    for message in (
        HealthReported(3, "entropy", "warn", "health.entropy: 0.01 nats"),
        HealthReported(7, "mismatch", "stop", "health.mismatch: [/] 0.2 nats"),
        RunFailed("step 7: health.mismatch: [/] 0.2 nats"),
    ):
        await head.send(LAUNCHER, message)
    receive = launcher._receive_messages  # pyright: ignore[reportPrivateUsage]
    unused: Any = None
    with capture_logs() as logged, pytest.raises(TrainingStopped, match=r"^step 7: health\.mismatch: "):
        await receive(bus, unused, unused, unused)
    assert display.lines == ["step 3: health.entropy: 0.01 nats", "step 7: health.mismatch: [/] 0.2 nats"]
    assert [(entry["event"], entry.get("check"), entry["log_level"]) for entry in logged] == [
        ("health.reported", "entropy", "warning"),
        ("health.reported", "mismatch", "warning"),
        ("run.failed", None, "error"),
    ]

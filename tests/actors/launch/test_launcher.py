"""A launch that ends before its processes are started."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from actors.launch.child_processes import ProcessDied
from actors.launch.command_lines import CommandLines
from actors.launch.launcher import Launcher, LogWriteFailure, RunEnding
from actors.runtime import wiring
from configs.run_folder import RunFolder
from configs.schema import RunConfig, TinyConfig
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


def launch(
    folder: RunFolder, code: str, monkeypatch: pytest.MonkeyPatch, should_interrupt: Callable[[], bool] = lambda: False
) -> RunEnding:
    """A launch with `code` as its first process, interrupted as soon as `should_interrupt()`."""
    run = replace(RunConfig(name="run"), tiny=TinyConfig())
    monkeypatch.setattr(CommandLines, "build_prepare_argv", lambda commands: [sys.executable, "-c", code])

    async def live() -> RunEnding:
        launching = asyncio.create_task(
            Launcher(run, folder, RecordedDisplay(), launch=1, log_failure=LogWriteFailure()).launch()
        )
        while not launching.done():
            await asyncio.sleep(0.01)
            if should_interrupt():
                os.kill(os.getpid(), signal.SIGINT)
                break
        return await launching

    return asyncio.run(asyncio.wait_for(live(), 60))


@pytest.mark.slow
def test_a_failed_task_preparation_ends_the_run_with_its_error(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(family(os.getpid()))
    with pytest.raises(ProcessDied, match=r"(?s)^preparing failed:\n.*no room for a tokenizer$"):
        launch(folder, "raise SystemExit('no room for a tokenizer')", monkeypatch)
    assert set(family(os.getpid())) <= before


@pytest.mark.slow
def test_an_interrupt_during_task_preparation_ends_the_run_without_leftovers(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wiring, "STOP_TIMEOUT_S", 0.05)
    before, output = set(family(os.getpid())), folder.logs / "prepare.out"
    with capture_logs() as logged:
        ending = launch(
            folder,
            "import signal; print('here', flush=True); signal.pause()",
            monkeypatch,
            lambda: output.exists() and "here" in output.read_text(),
        )
    assert ending == "interrupted"
    assert [entry["event"] for entry in logged] == ["process.started", "process.killed", "processes.stopped"]
    assert set(family(os.getpid())) <= before

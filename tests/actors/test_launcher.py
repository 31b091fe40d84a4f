"""A launch that ends before its processes are there."""

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

from actors import wiring
from actors.children import ProcessDied
from actors.commands import Commands
from actors.display import Display
from actors.launcher import Ending, Launcher
from actors.refusal import Refusal
from bus.messages import Progress
from configs.run_folder import RunFolder
from configs.schema import Run, Tiny
from tests.processes import family


class Said:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)

    def show(self, progress: Progress) -> None: ...

    def close(self) -> None: ...


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    folder = RunFolder(tmp_path / "run")
    for path in (folder.path, folder.logs, folder.sockets):
        path.mkdir()
    yield folder
    for path in folder.sockets.iterdir():
        path.unlink()
    folder.sockets.rmdir()


def launched(
    folder: RunFolder, code: str, monkeypatch: pytest.MonkeyPatch, when: Callable[[], bool] = lambda: False
) -> Ending:
    """A launch whose first process runs `code`; ^C comes as soon as `when` says so."""
    run = replace(Run(name="run"), tiny=Tiny())
    display: Display = Said()
    monkeypatch.setattr(Commands, "prepare", lambda commands: [sys.executable, "-c", code])

    async def live() -> Ending:
        launching = asyncio.create_task(Launcher(run, folder, display, boot=1, refusal=Refusal()).launch())
        while not launching.done():
            await asyncio.sleep(0.01)
            if when():
                os.kill(os.getpid(), signal.SIGINT)
                break
        return await launching

    return asyncio.run(asyncio.wait_for(live(), 60))


@pytest.mark.slow
def test_a_task_that_cannot_be_made_ends_the_run_with_its_complaint(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(family(os.getpid()))
    with pytest.raises(ProcessDied, match=r"(?s)^preparing failed:\n.*no room for a tokenizer$"):
        launched(folder, "raise SystemExit('no room for a tokenizer')", monkeypatch)
    assert set(family(os.getpid())) <= before


@pytest.mark.slow
def test_an_interrupt_while_the_task_is_made_ends_the_run_and_leaves_nothing(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wiring, "STOP_WITHIN_S", 0.05)
    before, output = set(family(os.getpid())), folder.logs / "prepare.out"
    with capture_logs() as said:
        ending = launched(
            folder,
            "import signal; print('here', flush=True); signal.pause()",
            monkeypatch,
            lambda: output.exists() and "here" in output.read_text(),
        )
    assert ending == "interrupted"
    assert [entry["event"] for entry in said] == ["process.started", "process.killed", "processes.stopped"]
    assert set(family(os.getpid())) <= before

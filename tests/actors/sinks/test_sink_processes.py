"""A process of a sink that hangs, fails or is killed delays neither the run nor other sinks, and loses no record."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from asterism.actors.launch import metric_sinks
from asterism.actors.launch.metric_sinks import MetricSinks
from asterism.actors.sinks.delivery import count_undelivered, get_ledger_path
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.machines import MetricsConfig
from asterism.configs.schema.run_config import RunConfig
from tests.actors.sinks.backends import write_lines

pytestmark = [pytest.mark.slow, pytest.mark.real_clock]
LINES = tuple({"kind": "step", "step": step, "reward": 0.5} for step in range(1, 4))


class SinksOfRun:
    """Sinks with processes of tests.actors.sinks.file_sink."""

    def __init__(self, folder: RunFolder, behaviours: dict[str, str], flush_s: float = 30.0) -> None:
        run = RunConfig(name="run", metrics=MetricsConfig(sinks=tuple(behaviours), flush_s=flush_s))
        self.folder = folder
        self.behaviours = behaviours
        self.printed: list[str] = []
        self.started: list[tuple[str, bool]] = []
        self.sinks = MetricSinks(run, folder, self.printed.append, self.build_argv)

    def build_argv(self, name: str, follow: bool) -> list[str]:
        self.started.append((name, follow))
        program = [sys.executable, "-m", "tests.actors.sinks.file_sink"]
        return [*program, name, str(self.folder.path), self.behaviours[name], *["--follow"] * follow]

    async def wait_for_output(self, name: str, text: str) -> None:
        path = self.folder.path / f"{name}.out"
        while not (path.exists() and text in path.read_text()):  # noqa: ASYNC110 - a file of another process
            await asyncio.sleep(0.01)

    async def wait_for_delivery(self, name: str) -> None:
        """Wait until the sink has delivered LINES."""
        while count_undelivered(self.folder, name) != (0, len(LINES)):  # noqa: ASYNC110 - a file of another process
            await asyncio.sleep(0.01)

    def read_output(self, name: str) -> list[str]:
        return (self.folder.path / f"{name}.out").read_text().split()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.setattr(metric_sinks, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(metric_sinks, "QUIET_S", 60.0)  # on a busy machine a process starts late
    folder = RunFolder(tmp_path)
    for path in (folder.logs, folder.sinks):
        path.mkdir()
    write_lines(folder, *LINES)
    return folder


async def test_the_records_are_delivered_during_the_run_and_at_its_end(folder: RunFolder) -> None:
    run = SinksOfRun(folder, {"tensorboard": "works"})
    run.sinks.start()
    await run.wait_for_output("tensorboard", "2")
    write_lines(folder, *LINES, {"kind": "step", "step": 4, "reward": 0.5})
    await run.sinks.finish()
    assert run.read_output("tensorboard") == ["0", "1", "2", "3", "closed"]
    assert run.printed == []


async def test_a_hanging_sink_is_killed_at_the_end_and_reported_with_its_undelivered_records(
    folder: RunFolder,
) -> None:
    run = SinksOfRun(folder, {"wandb": "hangs", "tensorboard": "works"}, flush_s=0.2)
    run.sinks.start()
    await run.wait_for_output("wandb", "hangs")
    await run.wait_for_delivery("tensorboard")
    with capture_logs() as logged:
        await run.sinks.finish()
    assert {entry["sink"]: entry["undelivered"] for entry in logged if entry["event"] == "sink.finished"} == {
        "wandb": 3,
        "tensorboard": 0,
    }
    assert run.printed == [
        "metrics: wandb has not received 3 of 3 records (not finished 0.2 s after the run); "
        f"`asterism metrics sync {folder.path} --sink wandb` delivers them"
    ]


async def test_a_failing_sink_is_started_again_and_its_error_is_printed_once(folder: RunFolder) -> None:
    run = SinksOfRun(folder, {"mlflow": "fails", "tensorboard": "works"})
    run.sinks.start()
    while run.started.count(("mlflow", True)) < 3:  # noqa: ASYNC110 - processes that end
        await asyncio.sleep(0.01)
    run.behaviours["mlflow"] = "works"
    await run.sinks.finish()
    assert run.read_output("mlflow") == run.read_output("tensorboard") == ["0", "1", "2", "closed"]
    assert len(run.printed) == 1
    assert "mlflow has an error, the run continues: " in run.printed[0]
    assert "ConnectionError: the backend is down" in (folder.logs / "sink-mlflow.out").read_text()


async def test_a_killed_sink_continues_after_the_records_that_it_has_delivered(folder: RunFolder) -> None:
    run = SinksOfRun(folder, {"trackio": "works"})
    with capture_logs() as logged:
        run.sinks.start()
        await run.wait_for_delivery("trackio")
        [pid] = [entry["pid"] for entry in logged if entry["event"] == "process.started"]
        os.kill(pid, signal.SIGKILL)
        write_lines(folder, *LINES, {"kind": "step", "step": 4, "reward": 0.5})
        await run.wait_for_output("trackio", "3")
        await run.sinks.finish()
    assert run.read_output("trackio") == ["0", "1", "2", "3", "closed"]
    assert [entry["exit_code"] for entry in logged if entry["event"] == "sink.died"] == [-signal.SIGKILL]


async def test_a_second_process_delivers_if_the_run_ends_before_the_first_is_ready(
    folder: RunFolder,
) -> None:
    run = SinksOfRun(folder, {"tensorboard": "works"})
    run.sinks.start()
    while not run.started:  # noqa: ASYNC110 - the process is being started
        await asyncio.sleep(0)
    await run.sinks.finish()
    assert run.read_output("tensorboard") == ["0", "1", "2", "closed"]
    assert run.started[0] == ("tensorboard", True)
    assert run.printed == []


async def test_a_damaged_ledger_does_not_fail_the_run(folder: RunFolder) -> None:
    get_ledger_path(folder, "wandb").write_text("{\n")
    run = SinksOfRun(folder, {"wandb": "works", "tensorboard": "works"})
    run.sinks.start()
    finishing = asyncio.create_task(run.sinks.finish())
    await run.wait_for_output("tensorboard", "closed")
    run.behaviours["wandb"] = "ends"  # all processes of this sink fail because of the ledger
    await finishing
    assert "wandb.jsonl: damaged" in run.printed[-1]
    assert run.read_output("tensorboard")[-1] == "closed"


async def test_a_run_without_sinks_starts_no_process(folder: RunFolder) -> None:
    run = SinksOfRun(folder, {})
    run.sinks.start()
    await run.sinks.finish()
    assert (run.started, run.printed) == ([], [])
    assert list(folder.sinks.iterdir()) == []

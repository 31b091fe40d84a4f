"""The `asterism log` subcommands read a run over real processes."""

import json
import re
import shutil
import signal
import subprocess
from pathlib import Path

import polars as pl
import pytest

from asterism.bus.event_log.reader import list_removed_events, read_events
from asterism.configs.run_folder import RunFolder
from tests.actors.runs.running import (
    ASTERISM,
    ROOT,
    Start,
    asterism,
    finish,
    from_cold_start_of,
    is_conserved,
    metrics,
    succeed,
    wait_until,
)
from tests.traces import checked_slices

pytestmark = pytest.mark.slow

TINY = ("rl.prompts=4", "rl.rollouts=8", "evaluation.questions=2")


@pytest.fixture(scope="module")
def folder(finished_run: tuple[RunFolder, str]) -> RunFolder:
    return finished_run[0]


def log(*arguments: object) -> str:
    done = asterism("log", *map(str, arguments))
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_export_writes_a_valid_trace_and_complete_tables(folder: RunFolder, tmp_path: Path) -> None:
    log("export", folder.path, "--parquet", tmp_path / "tables", "--chrome", tmp_path / "trace.json")
    tracks = checked_slices(tmp_path / "trace.json")
    lanes = [each for track, each in tracks.items() if track.startswith("trajectories/")]
    whole = [name for each in lanes for name, _, _, depth in each if depth == 0]
    assert len(lanes) < len(whole)
    trajectories = pl.read_parquet(tmp_path / "tables" / "trajectories")
    assert len(whole) == trajectories.height
    steps = [name for track, each in tracks.items() if track.startswith("steps/") for name, *_ in each]
    assert {f"step {number}" for number in (1, 2, 3)} < set(steps)
    finished = trajectories.filter(pl.col("purpose") == "train")
    assert finished.height == sum(step["trajectories"] for step in metrics(folder, "step"))
    assert (trajectories["token_ids"].list.len() == trajectories["loss_mask"].list.len()).all()


def test_show_follows_a_live_run_until_an_interrupt(folder: RunFolder, tmp_path: Path, start: Start) -> None:
    process = start(tmp_path, *from_cold_start_of(folder), *TINY)
    live = RunFolder(tmp_path / "demo")
    wait_until(lambda: (live.events / "rollout-0.sqlite").exists() and (live.events / "head.sqlite").exists(), process)
    command = [*ASTERISM, "log", "show", str(live.path), "--follow", "--kind", "StepCollected"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as follower:
        assert follower.stdout is not None
        # The recipe and the recorder receive two events each.
        steps = [re.search(r"step (\d)", follower.stdout.readline()) for _ in range(4)]
        assert [found.group(1) for found in steps if found] == ["1", "1", "2", "2"]
        follower.send_signal(signal.SIGINT)
        assert follower.wait(timeout=30) == 0
    finish(process)


@pytest.mark.nightly
def test_a_run_with_keep_steps_can_be_resumed(folder: RunFolder, tmp_path: Path, start: Start) -> None:
    settings = (*from_cold_start_of(folder), *TINY, "log.keep_steps=1")
    succeed(start(tmp_path, *settings, "rl.steps=4"))
    run = RunFolder(tmp_path / "demo")
    summary = json.loads(run.summary.read_text())
    assert is_conserved(summary)
    assert summary["replay_identical"] is None
    for process in ("head", "rollout-0"):
        assert sum(each.events for each in list_removed_events(run.events / f"{process}.sqlite")) > 0
    collected = read_events(run.events / "head.sqlite", kinds=["StepCollected"])
    assert sum(1 for _ in collected) == 2 * 4  # events kept for a resume
    assert "not replayed: log.keep_steps" in log("replay", run.path, "--verify")
    shutil.rmtree(run.get_checkpoint_path(4))
    succeed(start(tmp_path, *settings, "rl.steps=4", "--resume"))
    assert [step["step"] for step in metrics(run, "step")] == [1, 2, 3, 4]

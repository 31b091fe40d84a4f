"""The `asterism log` subcommands read a run over real processes."""

import json
import re
import shutil
import signal
import subprocess
from pathlib import Path

import polars as pl
import pytest

from asterism.bus.codec import encode
from asterism.bus.event_log.reader import list_removed_events
from asterism.bus.event_log.writer import EventLog
from asterism.bus.messages import BufferCursor, Envelope, StepCollected, StepCounts
from asterism.configs.run_folder import RunFolder
from tests.actors.cli.invoking import read_output
from tests.actors.cli.log.test_fork_and_roc import copy_run
from tests.actors.runs.running import ASTERISM, ROOT, Start, is_conserved, metrics, read_messages
from tests.traces import checked_slices

pytestmark = pytest.mark.slow


def test_export_writes_a_valid_trace_and_complete_tables(finished: RunFolder, tmp_path: Path) -> None:
    read_output("log", "export", finished.path, "--parquet", tmp_path / "tables", "--chrome", tmp_path / "trace.json")
    tracks = checked_slices(tmp_path / "trace.json")
    lanes = [each for track, each in tracks.items() if track.startswith("trajectories/")]
    whole = [name for each in lanes for name, _, _, depth in each if depth == 0]
    assert len(lanes) < len(whole)
    trajectories = pl.read_parquet(tmp_path / "tables" / "trajectories")
    assert len(whole) == trajectories.height
    steps = [name for track, each in tracks.items() if track.startswith("steps/") for name, *_ in each]
    assert {f"step {number}" for number in (1, 2, 3)} < set(steps)
    trained = trajectories.filter(pl.col("purpose") == "train")
    assert trained.height == sum(step["trajectories"] for step in metrics(finished, "step"))
    assert (trajectories["token_ids"].list.len() == trajectories["loss_mask"].list.len()).all()


def test_show_follows_a_growing_log_until_an_interrupt(finished: RunFolder, tmp_path: Path) -> None:
    copy = copy_run(finished, tmp_path)
    command = [*ASTERISM, "log", "show", str(copy.path), "--follow", "--kind", "StepCollected"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as follower:
        assert follower.stdout is not None
        # The recipe and the recorder receive two events each.
        assert [read_step(follower.stdout.readline()) for _ in range(6)] == [1, 1, 2, 2, 3, 3]
        log = EventLog(copy.events / "head.sqlite")
        for step in (4, 5):
            collected = Envelope("head/buffer", "head/recipe", StepCollected(step, 1, StepCounts(), {}, BufferCursor()))
            log.append(1e10, "recipe", "head/buffer", "StepCollected", None, encode(collected))
            assert read_step(follower.stdout.readline()) == step
        log.close()
        follower.send_signal(signal.SIGINT)
        assert follower.wait(timeout=30) == 0


def read_step(line: str) -> int:
    (step,) = re.findall(r"step (\d)", line)
    return int(step)


@pytest.mark.nightly
def test_a_run_with_keep_steps_can_be_resumed(start_trained: Start) -> None:
    settings = ("rl.prompts=4", "rl.rollouts=8", "rl.steps=4", "evaluation.questions=2", "log.keep_steps=1")
    run = start_trained(*settings)
    run.succeed()
    summary = json.loads(run.folder.summary.read_text())
    assert is_conserved(summary)
    assert summary["replay_identical"] is None
    for process in ("head", "rollout-0"):
        assert sum(each.events for each in list_removed_events(run.folder.events / f"{process}.sqlite")) > 0
    assert len(read_messages(run.folder, "head", StepCollected)) == 2 * 4  # events kept for a resume
    assert "not replayed: log.keep_steps" in read_output("log", "replay", run.folder.path, "--verify")
    shutil.rmtree(run.folder.get_checkpoint_path(4))
    start_trained(*settings, "--resume").succeed()
    assert [step["step"] for step in metrics(run.folder, "step")] == [1, 2, 3, 4]

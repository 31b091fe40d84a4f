"""Whole runs over real processes whose rollouts run ahead of the learner by one version: one carries what a step leaves
over, one stops it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from bus.codec import decode
from bus.event_log import read_events
from bus.messages import StepRequested, TrajectoryFinished
from configs.run_folder import RunFolder

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SETTINGS = (
    *("tiny.num_train_questions=64", "tiny.num_test_questions=16", "tiny.num_sft_dialogues=4800"),
    *("sft.steps=150", "sft.batch_size=32", "rl.steps=3", "rl.prompts=4", "rl.rollouts=8"),
    *("rl.max_staleness=1", "rl.oversubscribe=2.0"),
    *("learner.checkpoint_every=1", "learner.threads=1", "evaluation.questions=2", "sandbox.backend=process"),
)
PATIENCE_S = 240.0


def run(runs: Path, *settings: str) -> RunFolder:
    every = (*SETTINGS, f'runs_folder="{runs}"', *settings)
    arguments = [argument for setting in every for argument in ("--set", setting)]
    command = [sys.executable, "-m", "actors.cli", "run", "configs/tiny.toml", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return RunFolder(runs / "demo")


@pytest.fixture(scope="module")
def carrying(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunFolder]:
    yield run(tmp_path_factory.mktemp("carrying"), "rl.leftovers=carry")


@pytest.fixture(scope="module")
def aborting(tmp_path_factory: pytest.TempPathFactory, carrying: RunFolder) -> Iterator[RunFolder]:
    """From the other run's cold start."""
    yield run(
        tmp_path_factory.mktemp("aborting"),
        *("sft.steps=0", f"model.checkpoint={carrying.checkpoint(0)}", "rl.prompts=2", "rl.oversubscribe=4.0"),
        *(f"data.train={carrying.data / 'train.jsonl'}", f"data.test={carrying.data / 'test.jsonl'}"),
    )


def lines(folder: RunFolder, kind: str) -> list[dict[str, float]]:
    decoded = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    return [line for line in decoded if line["kind"] == kind]


def finished(folder: RunFolder) -> list[TrajectoryFinished]:
    events = read_events(folder.events / "head.sqlite", kinds=["TrajectoryFinished"])
    messages = [decode(event.frame).message for event, _ in events]
    return [message for message in messages if isinstance(message, TrajectoryFinished)]


@pytest.mark.parametrize("name", ["carrying", "aborting"])
def test_every_trajectory_ends_once_and_the_run_replays(name: str, request: pytest.FixtureRequest) -> None:
    folder: RunFolder = request.getfixturevalue(name)
    summary = json.loads(folder.summary.read_text())
    ends = sum(summary[f"trajectories_{end}"] for end in ("finished", "failed", "aborted", "abandoned"))
    assert summary["trajectories_started"] == ends
    assert summary["trajectories_failed"] == summary["trajectories_abandoned"] == 0
    assert summary["replay_identical"] is True
    assert [line["step"] for line in lines(folder, "step")] == [1, 2, 3]
    assert sorted(line["step"] for line in lines(folder, "lengths")) == [1, 2, 3]


@pytest.mark.parametrize("name", ["carrying", "aborting"])
def test_a_step_is_collected_while_the_one_before_is_trained(name: str, request: pytest.FixtureRequest) -> None:
    folder: RunFolder = request.getfixturevalue(name)
    events = read_events(folder.events / "head.sqlite", kinds=["StepRequested"])
    asked = {message for event, _ in events if isinstance(message := decode(event.frame).message, StepRequested)}
    assert asked == {StepRequested(1, 0), StepRequested(2, 0), StepRequested(3, 1)}


@pytest.mark.parametrize("name", ["carrying", "aborting"])
def test_what_is_trained_on_is_one_version_behind_at_most(name: str, request: pytest.FixtureRequest) -> None:
    """The learner refuses anything else; and the second step's rows are from before the first update."""
    steps = lines(request.getfixturevalue(name), "step")
    assert all(step["staleness_max"] <= 1.0 for step in steps)
    assert steps[0]["staleness_max"] == 0.0
    assert steps[1]["staleness_max"] == 1.0
    assert steps[1]["rows"] > 0


def test_turns_go_on_while_new_weights_are_loaded(carrying: RunFolder) -> None:
    """Versions never fall within a trajectory, and all but the last were generated with."""
    seen = set[int]()
    for trajectory in finished(carrying):
        versions = np.frombuffer(trajectory.versions, np.int32)
        generated = versions[np.frombuffer(trajectory.loss_mask, np.uint8).astype(bool)]
        assert (np.diff(generated) >= 0).all()
        seen |= set(generated.tolist())
    assert seen >= {0, 1, 3}  # 3: the last evaluation


def test_what_is_stopped_is_counted_and_its_length_bias_reported(aborting: RunFolder) -> None:
    summary = json.loads(aborting.summary.read_text())
    reported = lines(aborting, "lengths")
    assert sum(line["aborted_trajectories"] for line in reported) == summary["trajectories_aborted"]
    for line in reported:
        assert line["taken_trajectories"] <= line["started_trajectories"]
        expected = line["taken_response_tokens"] / line["started_response_tokens"]
        assert line["length_bias"] == pytest.approx(expected)

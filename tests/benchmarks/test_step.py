"""The step benchmark, in its short form: both ways end, did the same work, and their figures fit together."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SECONDS = (
    *("step_s_processes", "step_s_single", "rollout_s_processes", "rollout_s_single"),
    *("train_s_processes", "train_s_single", "weights_s_processes"),
    "step_s_without_log",
)


@pytest.fixture(scope="module")
def lines() -> list[str]:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.step", "--quick", "--seed", "3"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_last_line_holds_every_figure(lines: list[str]):
    figures = json.loads(lines[-1])
    assert set(figures) == {*SECONDS, "log_ratio", "ratio", "steps", "seed", "threads_generator", "threads_learner"}
    assert (figures["steps"], figures["seed"]) == (2, 3)
    assert figures["threads_generator"] >= 1
    assert figures["threads_learner"] >= 1


def test_the_parts_of_a_step_add_up_to_it(lines: list[str]):
    figures = json.loads(lines[-1])
    parts = [figures[f"{part}_s_processes"] for part in ("rollout", "train", "weights")]
    assert all(figures[name] >= 0 for name in SECONDS)
    assert min(figures["rollout_s_processes"], figures["rollout_s_single"]) > 0
    assert sum(parts) == pytest.approx(figures["step_s_processes"], abs=2e-3)
    assert figures["rollout_s_single"] + figures["train_s_single"] <= figures["step_s_single"] + 2e-3
    assert figures["ratio"] == pytest.approx(figures["step_s_processes"] / figures["step_s_single"], rel=0.05)


def test_all_ways_generate_as_many_tokens(lines: list[str]):
    (row,) = (line.split() for line in lines if line.startswith("generated_tokens"))
    assert float(row[1]) > 0
    assert [float(count) for count in row[2:]] == pytest.approx([float(row[1])] * 2, rel=0.05)


def test_the_cost_of_the_processes_is_named_in_a_sentence(lines: list[str]):
    assert lines[-2].startswith("A step takes ")
    assert "times as long" in lines[-2]

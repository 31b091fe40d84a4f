"""The step benchmark, in its short form: all ways end, did the same work, and their figures fit together."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # each of five ways starts processes

ROOT = Path(__file__).parents[2]
WAYS = ("processes", "without_log", "in_process", "in_process_without_log", "single")
SECONDS = (*(f"{name}_{way}" for name in ("step_s", "rollout_s", "train_s") for way in WAYS), "weights_s_processes")
RATIOS = {
    "log_ratio": ("processes", "without_log"),
    "log_ratio_in_process": ("in_process", "in_process_without_log"),
    "zeromq_ratio": ("processes", "in_process"),
    "ratio": ("processes", "single"),
}


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
    assert set(figures) == {*SECONDS, *RATIOS, "steps", "seed", "threads_generator", "threads_learner"}
    assert (figures["steps"], figures["seed"]) == (2, 3)
    assert figures["threads_generator"] >= 1
    assert figures["threads_learner"] >= 1


def test_the_parts_of_a_step_add_up_to_it(lines: list[str]):
    figures = json.loads(lines[-1])
    parts = [figures[f"{part}_s_processes"] for part in ("rollout", "train", "weights")]
    assert sum(parts) == pytest.approx(figures["step_s_processes"], abs=2e-3)
    for way in WAYS:
        assert min(figures[f"rollout_s_{way}"], figures[f"train_s_{way}"]) > 0
        assert figures[f"rollout_s_{way}"] + figures[f"train_s_{way}"] <= figures[f"step_s_{way}"] + 2e-3


def test_ratios_are_those_of_a_step_s_seconds(lines: list[str]):
    figures = json.loads(lines[-1])
    for name, (way, to) in RATIOS.items():
        assert figures[name] == pytest.approx(figures[f"step_s_{way}"] / figures[f"step_s_{to}"], rel=0.05)


def test_all_ways_generate_as_many_tokens(lines: list[str]):
    (row,) = (line.split() for line in lines if line.startswith("generated_tokens"))
    assert float(row[1]) > 0
    assert [float(count) for count in row[2:]] == pytest.approx([float(row[1])] * (len(WAYS) - 1), rel=0.05)


def test_the_cost_of_the_processes_is_named_in_a_sentence(lines: list[str]):
    assert lines[-2].startswith("A step takes ")
    assert "times as long" in lines[-2]

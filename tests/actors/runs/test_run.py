"""Whole runs of the tiny task have all real processes: launcher, head, rollout, generator, executor and learner."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from asterism.bus.messages import AnswerGraded, CodeFinished, TrajectoryFinished
from asterism.configs.file_manifest import MANIFEST_NAME
from asterism.configs.run_folder import RunFolder
from tests.actors.cli.invoking import read_output, read_refusal
from tests.actors.runs.running import (
    Start,
    asterism_output,
    is_conserved,
    metrics,
    read_log_entries,
    read_messages,
    read_token_versions,
)
from tests.processes import processes_that_name

pytestmark = pytest.mark.slow


def test_a_run_writes_its_documented_files(finished_run: tuple[RunFolder, str]) -> None:
    folder, output = finished_run
    summary = json.loads(folder.summary.read_text())
    documented = (
        "seed params sft_s rl_s steps pass1_start pass1_end greedy_start greedy_end err_positive_start err_positive_end "
        "tokens_per_s trajectories_started trajectories_finished trajectories_failed replay_identical"
    )
    assert set(documented.split()) <= set(summary)
    assert summary["steps"] == 3
    assert summary["sft_s"] > 0
    assert summary["replay_identical"] is True
    assert summary["isolation"]["backend"] == "process"
    assert folder.curves.read_bytes().startswith(b"\x89PNG")
    assert "correct answers" in output


def test_each_started_trajectory_finishes_or_fails(finished: RunFolder) -> None:
    summary = json.loads(finished.summary.read_text())
    assert is_conserved(summary)
    assert summary["trajectories_failed"] == 0
    assert summary["trajectories_abandoned"] == 0
    assert summary["trajectories_started"] >= 3 * 6 * 8 + 4 * 6


def test_the_phases_of_a_step_add_up(finished: RunFolder) -> None:
    for step in metrics(finished, "step"):
        assert step["rollout_s"] + step["train_s"] + step["weights_s"] == pytest.approx(step["step_s"])


def test_the_learner_updates_the_weights_on_generated_tokens(finished: RunFolder) -> None:
    steps = metrics(finished, "step")
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert sum(step["rows"] for step in steps) > 0
    assert sum(step["updates"] for step in steps) > 0
    assert all(step["mismatch_max"] < 1e-4 for step in steps if step["rows"])


def test_every_generated_token_has_the_version_of_the_previous_step(finished: RunFolder) -> None:
    assert read_token_versions(finished) == {
        0: {0},
        1: {1},
        2: {2, 3},
    }  # the last evaluation uses version 3


def test_no_process_socket_or_shared_memory_is_left(finished: RunFolder) -> None:
    assert processes_that_name(f"--run-folder {finished.path} ") == []  # other runs read its data and checkpoint
    assert not finished.sockets.exists()
    assert not finished.shared_memory.exists()


def test_a_finished_run_can_be_replayed_and_its_stories_shown(finished: RunFolder) -> None:
    assert "identical" in read_output("log", "replay", finished.path, "--verify")
    story = read_output("log", "story", finished.path, 3)
    kinds = ["StartGroup", "LeaseRequested", "LeaseGranted", "TurnGenerated", "TrajectoryFinished"]
    positions = [story.index(kind) for kind in kinds]
    assert positions == sorted(positions)
    assert "no event of trajectory 99999" in read_refusal("log", "story", finished.path, 99999)


def test_the_report_agrees_with_the_event_log_within_one_percent(finished: RunFolder) -> None:
    report = json.loads(read_output("report", finished.path, "--json"))
    trajectories = report["trajectories"]
    ended = read_messages(finished, "head", TrajectoryFinished)
    assert trajectories["started"] == trajectories["ended"] == len(ended)
    assert trajectories["generated_tokens"] == pytest.approx(
        sum(sum(each.record.loss_mask) for each in ended), rel=0.01
    )
    for wait, times in trajectories["waits"].items():
        assert times["total_s"] == pytest.approx(sum(getattr(each, wait) for each in ended), rel=0.01)
    assert [step["trajectories"] for step in report["steps"] if step["rollout_s"] is not None] == [
        step["trajectories"] for step in metrics(finished, "step")
    ]
    answered = read_messages(finished, "rollout-0", CodeFinished)
    assert report["executors"][0]["calls"] == pytest.approx(len(answered), rel=0.01)
    assert report["unusable_lines"] == 0


@pytest.mark.nightly
def test_two_executors_share_a_run(start_trained: Start) -> None:
    run = start_trained("sandbox.executors=2")
    run.succeed()
    answers = read_messages(run.folder, "rollout-0", CodeFinished, AnswerGraded)
    assert {answer.executor for answer in answers} == {"executor-0/1", "executor-1/1"}
    assert json.loads(run.folder.summary.read_text())["replay_identical"] is True


def test_a_bfloat16_engines_logprobs_differ_within_the_stated_bounds_and_a_health_check_stops_the_run(
    start_trained: Start,
) -> None:
    """The health check has a limit that every difference exceeds, so that the first step ends the run."""
    check = ("health.mismatch=stop", "health.mismatch_k3_nats=0", "health.window_steps=1")
    sizes = ("rl.steps=50", "rl.prompts=6", "rl.rollouts=8", "evaluation.questions=0")
    run = start_trained("engine.dtype=bfloat16", *check, *sizes)
    output = run.end(1)
    assert re.search(r"failed: step 1: health\.mismatch\b", output)
    assert re.search(r"in the last 1 steps, the KL divergence \(k3\) is \S+ nats per token", " ".join(output.split()))
    report = next(each for each in metrics(run.folder, "health") if each["check"] == "mismatch")
    assert (report["step"], report["action"]) == (1, "stop")
    assert "mismatch" in [each["check"] for each in read_log_entries(run.folder, "health.reported")]
    steps = metrics(run.folder, "step")
    assert 1 <= len(steps) < 50  # some steps can end before the processes stop
    assert steps[0]["rows"] > 0
    assert 1e-4 < steps[0]["mismatch_mean"] < 0.01  # measured: 0.002 to 0.003; in float32 1e-7
    assert steps[0]["mismatch_max"] < 0.3  # measured: 0.09
    assert not run.folder.curves.exists()  # log.curves is false


@pytest.mark.nightly
def test_a_run_can_consist_of_only_the_cold_start(tmp_path: Path, start: Start) -> None:
    run = start(tmp_path, "rl.steps=0", "evaluation.questions=0")
    run.succeed()
    assert json.loads(run.folder.summary.read_text())["steps"] == 0
    assert (run.folder.get_checkpoint_path(0) / "model.safetensors").exists()


@pytest.mark.nightly
def test_a_configuration_of_name_model_and_data_runs(tmp_path: Path, finished: RunFolder) -> None:
    """All other keys keep their defaults, except that the run and its trajectories are short."""
    config = tmp_path / "own.toml"
    config.write_text(
        f'name = "own"\n[model]\ncheckpoint = "{finished.get_checkpoint_path(0)}"\n'
        f'[data]\ntrain = "{finished.data / "train.jsonl"}"\ntest = "{finished.data / "test.jsonl"}"\n'
    )
    short = ("rl.steps=1", "rl.prompts=2", "rl.rollouts=4", "evaluation.questions=6")
    settings = (*short, "dialogue.response_tokens=192", f"runs_folder={tmp_path}")
    printed = asterism_output("run", config, *(flag for setting in settings for flag in ("--set", setting)))
    assert f"data.train: {finished.data / 'train.jsonl'}: 64 questions" in printed
    summary = json.loads(RunFolder(tmp_path / "own").summary.read_text())
    assert summary["steps"] == 1
    assert summary["replay_identical"] is True


def test_a_run_without_any_result_fails_with_the_first_cause(
    finished: RunFolder, tmp_path: Path, start_trained: Start
) -> None:
    """The weights are finite, but their logits overflow: every trajectory of the first evaluation fails."""
    name, broken = "model.norm.weight", tmp_path / "broken"
    shutil.copytree(finished.get_checkpoint_path(0), broken, ignore=shutil.ignore_patterns(MANIFEST_NAME))
    tensors = load_file(broken / "model.safetensors")
    save_file({**tensors, name: np.full_like(tensors[name], 3e38)}, broken / "model.safetensors", {"format": "pt"})
    run = start_trained(f"model.checkpoint={broken}")
    output = run.end(1)
    assert "every trajectory of evaluation start_sampled failed, 6 in all. The first: engine: " in output
    assert "logits are not finite" in output
    assert "accuracy" not in output
    assert not run.folder.summary.exists()

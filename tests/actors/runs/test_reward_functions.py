"""A user's reward functions, loss and advantages work in whole runs."""

import json
from pathlib import Path
from typing import Any

import pytest

from asterism.bus.codec import decode
from asterism.bus.event_log.reader import read_events
from asterism.bus.messages import TrajectoryFinished
from asterism.configs.run_folder import RunFolder
from tests.actors.runs.running import (
    Start,
    asterism,
    finish,
    from_cold_start_of,
    metrics,
    read_conserved_summary,
    succeed,
)

pytestmark = pytest.mark.slow

REWARDS = """
import hashlib

def score_length(completion_ids, ending, **columns):
    return [-0.001 * len(ids) for ids in completion_ids]

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(ground_truth in solution_str), "digits": len(ground_truth)}

def fail_for_some(completions, question):
    if hashlib.blake2b(question[0].encode()).digest()[0] % 4 == 0:
        raise ValueError("no opinion")
    return [float(len(completions[0]))]

def compute_loss(batch):
    from asterism.policies.losses.policy_loss import LossOutput

    ratios_S = batch.mean_by_sequence(batch.logprobs_N - batch.behaviour_logprobs_N).exp()
    loss = -(ratios_S * batch.advantages_S).sum() / batch.minibatch_sequences
    return LossOutput(loss, sequence_means={"sequence_ratio": ratios_S.detach().sum()})

def center(rewards):
    return [reward - min(rewards) for reward in rewards]

def fail_for_all(completions):
    raise RuntimeError("the judge is down")
"""


@pytest.fixture
def rewards(tmp_path: Path) -> str:
    path = tmp_path / "rewards.py"
    path.write_text(REWARDS)
    return str(path)


def set_functions(**functions: str) -> tuple[str, ...]:
    return tuple(f"reward.functions.{name}={spec}" for name, spec in functions.items())


def test_rewards_of_functions_are_logged_trained_on_and_replayed(
    tmp_path: Path, rewards: str, finished_run: tuple[RunFolder, str], start: Start
) -> None:
    functions = set_functions(correct="math", length=f"{rewards}:score_length", verl=f"{rewards}:compute_score")
    made = from_cold_start_of(finished_run[0])
    plug_ins = (f"learner.loss.function={rewards}:compute_loss", f"rl.advantage_estimator={rewards}:center")
    succeed(start(tmp_path, *made, *functions, *plug_ins, "reward.weights.verl=0.5", "rl.steps=2"))
    folder = RunFolder(tmp_path / "demo")
    read_conserved_summary(folder)
    finished = [
        decode(event.frame).message
        for event, _ in read_events(folder.events / "head.sqlite", kinds=["TrajectoryFinished"])
    ]
    assert finished
    for message in finished:
        assert isinstance(message, TrajectoryFinished)
        length = -0.001 * message.record.response_tokens
        correct, verl = message.components["correct"], message.components["verl"]
        assert message.components == {
            "correct": correct,
            "length": length,
            "verl": verl,
            "verl.digits": pytest.approx(1.5, abs=1.5),
        }
        assert message.reward == pytest.approx(correct + length + 0.5 * verl)
        assert correct == 0.0 or message.ending == "answered"
    for step in metrics(folder, "step"):
        assert {"reward: correct", "reward: length", "reward: verl", "reward: verl.digits"} <= step.keys()
        assert step["rows"] == 0 or step["sequence_ratio"] == pytest.approx(1.0, abs=0.2)
        assert "clip_fraction" not in step
    assert sum(step["rows"] for step in metrics(folder, "step")) > 0
    assert read_regraded(folder)["changed"] == 0
    assert read_regraded(folder, "reward.weights.length=0")["changed"] > 0
    again = asterism("log", "replay", str(folder.path), "--verify")
    assert again.returncode == 0, again.stdout + again.stderr
    trajectory = next(message.trajectory_id for message in finished if isinstance(message, TrajectoryFinished))
    result_file = tmp_path / "fork.json"
    fork = asterism("log", "fork", str(folder.path), str(trajectory), "--turn", "0", "--json", str(result_file))
    assert fork.returncode == 0, fork.stdout + fork.stderr
    result = json.loads(result_file.read_text())
    assert result["branches"][0]["outcome"]["reward"] == pytest.approx(result["original"]["reward"])


def read_regraded(folder: RunFolder, *settings: str, exit_code: int = 0) -> dict[str, Any]:
    result = folder.path.with_name("regraded.json")  # a path outside: other tests compare the files of the run
    flags = [flag for setting in settings for flag in ("--set", setting)]
    done = asterism("log", "regrade", str(folder.path), *flags, "--json", str(result))
    assert done.returncode == exit_code, done.stdout + done.stderr
    return json.loads(result.read_text())


def test_stored_trajectories_are_graded_again_without_an_engine(
    rewards: str, finished_run: tuple[RunFolder, str]
) -> None:
    folder = finished_run[0]
    same = read_regraded(folder)
    assert same["trajectories"] > 3 * 8 * 16
    assert (same["changed"], same["failed"]) == (0, {})
    functions = set_functions(correct="math", length=f"{rewards}:score_length")
    other = read_regraded(folder, *functions)
    assert other["changed"] == same["trajectories"]  # no response is empty
    assert other["new_reward"] < other["reward"] == same["reward"]
    for change in other["changes"]:
        assert change["new_components"]["correct"] == change["reward"]
        assert change["new_reward"] == pytest.approx(change["reward"] + change["new_components"]["length"])
    broken = read_regraded(folder, *set_functions(all=f"{rewards}:fail_for_all"), exit_code=1)
    assert broken["failed"] == {"all raised RuntimeError: the judge is down": same["trajectories"]}
    assert (broken["new_reward"], broken["changed"]) == (None, 0)


@pytest.mark.nightly
def test_a_function_that_raises_for_some_rows_masks_their_trajectories(
    tmp_path: Path, rewards: str, finished_run: tuple[RunFolder, str], start: Start
) -> None:
    functions = set_functions(some=f"{rewards}:fail_for_some")
    output = succeed(
        start(tmp_path, *from_cold_start_of(finished_run[0]), *functions, "rl.steps=2", "evaluation.questions=16")
    )
    folder = RunFolder(tmp_path / "demo")
    first = [line for line in output.splitlines() if "failed, the first one of its kind: " in line]
    assert len(first) == 1
    assert "reward: some raised ValueError: no opinion" in first[0]
    assert f"asterism log story {folder.path} " in first[0]
    traceback = (folder.logs / "executor-0.out").read_text()
    assert traceback.count("Traceback") == 1
    assert 'raise ValueError("no opinion")' in traceback
    summary = read_conserved_summary(folder)
    assert 0 < summary["trajectories_failed"] < summary["trajectories_started"]
    assert sum(line["failed"] for line in metrics(folder, "evaluation")) > 0


def test_a_function_that_raises_for_all_rows_ends_the_run_with_its_error(
    tmp_path: Path, rewards: str, finished_run: tuple[RunFolder, str], start: Start
) -> None:
    functions = set_functions(all=f"{rewards}:fail_for_all")
    process = start(tmp_path, *from_cold_start_of(finished_run[0]), *functions)
    output = finish(process)
    assert process.returncode == 1
    assert "reward: all raised RuntimeError: the judge is down" in output


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("{file}:absent", 'reward.functions.f: {file} has no "absent"'),
        ("{file}.py:f", "reward.functions.f: {file}.py: no such file"),
        ("nobodys.module:f", "reward.functions.f: no module nobodys"),
        ("math:sqrt", "neither TRL's parameter `completions` nor verl's `solution_str`"),
    ],
)
def test_a_wrong_import_path_is_reported_before_anything_is_created(
    tmp_path: Path, rewards: str, spec: str, problem: str, start: Start
) -> None:
    process = start(tmp_path / "runs", *set_functions(f=spec.format(file=rewards)))
    output = finish(process)
    assert process.returncode != 0
    assert problem.format(file=rewards) in output.replace("\n", " ")
    assert not (tmp_path / "runs" / "demo").exists()

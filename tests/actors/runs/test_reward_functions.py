"""Trajectories are graded again, and failures of a user's reward functions are counted."""

import json
from pathlib import Path
from typing import Any

import pytest

from asterism.configs.run_folder import RunFolder
from tests.actors.cli.invoking import invoke
from tests.actors.runs.running import Start, metrics, read_conserved_summary

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


def write_rewards(folder: Path) -> str:
    path = folder / "rewards.py"
    path.write_text(REWARDS)
    return str(path)


@pytest.fixture
def rewards(tmp_path: Path) -> str:
    return write_rewards(tmp_path)


def set_functions(**functions: str) -> tuple[str, ...]:
    return tuple(f"reward.functions.{name}={spec}" for name, spec in functions.items())


def read_regraded(folder: RunFolder, *settings: str, exit_code: int = 0) -> dict[str, Any]:
    result = folder.path.with_name("regraded.json")  # outside of the run, whose files other tests compare
    flags = [flag for setting in settings for flag in ("--set", setting)]
    assert invoke("log", "regrade", folder.path, *flags, "--json", result).exit_code == exit_code
    return json.loads(result.read_text())


def test_stored_trajectories_are_graded_again_without_an_engine(rewards: str, finished: RunFolder) -> None:
    same = read_regraded(finished)
    assert same["trajectories"] > 3 * 6 * 8
    assert (same["changed"], same["failed"]) == (0, {})
    functions = set_functions(correct="math", length=f"{rewards}:score_length")
    other = read_regraded(finished, *functions)
    assert other["changed"] == same["trajectories"]  # every response has a length above 0
    assert other["new_reward"] < other["reward"] == same["reward"]
    for change in other["changes"]:
        assert change["new_components"]["correct"] == change["reward"]
        assert change["new_reward"] == pytest.approx(change["reward"] + change["new_components"]["length"])
    broken = read_regraded(finished, *set_functions(all=f"{rewards}:fail_for_all"), exit_code=1)
    assert broken["failed"] == {"all raised RuntimeError: the judge is down": same["trajectories"]}
    assert (broken["new_reward"], broken["changed"]) == (None, 0)


@pytest.mark.nightly
def test_a_function_that_raises_for_some_rows_masks_their_trajectories(rewards: str, start_trained: Start) -> None:
    run = start_trained(*set_functions(some=f"{rewards}:fail_for_some"), "rl.steps=2", "evaluation.questions=16")
    output, folder = run.succeed(), run.folder
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

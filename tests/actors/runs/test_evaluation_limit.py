"""Evaluations have a higher length limit than training: in a run, in `asterism eval`, and in forks."""

import json
from typing import NamedTuple

import pytest

from asterism.analysis.evaluation.answer_records import read_answers
from asterism.bus.addresses import HEAD, ROLLOUT
from asterism.bus.messages import StartGroup, TrajectoryFinished
from asterism.configs.run_folder import RunFolder
from tests.actors.runs.running import asterism_output, read_conserved_summary, read_messages, whole_run

pytestmark = pytest.mark.slow

TRAINED, EVALUATED = 40, 96  # limits in response tokens


class Ended(NamedTuple):
    trajectory: int
    tokens: int  # tokens of the response
    ending: str


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """Return a run with a cold start of only four steps, so that most answers reach their length limit."""
    limits = (f"dialogue.response_tokens={TRAINED}", f"evaluation.response_tokens={EVALUATED}")
    settings = ("rl.steps=2", "evaluation.every=1", "evaluation.questions=4", "determinism=strict")
    return whole_run(tmp_path_factory.mktemp("limited"), *limits, *settings)[0]


def list_ended(folder: RunFolder, purpose: str) -> list[Ended]:
    groups = {each.group_id for each in read_messages(folder, ROLLOUT, StartGroup) if each.purpose == purpose}
    return [
        Ended(end.trajectory_id, end.record.response_tokens, end.ending)
        for end in read_messages(folder, HEAD, TrajectoryFinished)
        if end.group_id in groups
    ]


def test_only_evaluations_exceed_the_limit_of_training_and_the_run_replays(limited: RunFolder) -> None:
    read_conserved_summary(limited)
    trained, evaluated = list_ended(limited, "train"), list_ended(limited, "evaluate")
    assert len(evaluated) == 4 * 5  # per question 2 at the start, 1 after step 1, 2 at the end
    assert (max(each.tokens for each in trained), max(each.tokens for each in evaluated)) == (TRAINED, EVALUATED)
    assert all(each.ending == "length" for each in trained + evaluated if each.tokens in (TRAINED, EVALUATED))


def test_a_standalone_evaluation_has_the_limit_and_the_tokens_of_the_run(limited: RunFolder) -> None:
    asterism_output("eval", f"{limited.path}:2", "--questions", 4, "--name", "alone")
    folder = RunFolder(limited.path.parent / "alone")
    assert json.loads(folder.results.read_text())["limits"]["response_tokens"] == EVALUATED
    during = [each for each in read_answers(limited.answers) if each.label == "end_sampled"]
    found = read_answers(folder.answers)
    assert sorted((each.seed, each.digest) for each in found) == sorted((each.seed, each.digest) for each in during)
    assert max(each.response_tokens for each in found) == EVALUATED


def test_a_branch_of_an_evaluation_has_its_limit(limited: RunFolder) -> None:
    trajectory = [each.trajectory for each in list_ended(limited, "evaluate") if each.tokens == EVALUATED][-1]
    result = limited.path.parent / "branch.json"
    asterism_output("log", "fork", limited.path, trajectory, "--turn", 0, "--json", result)
    outcome = json.loads(result.read_text())["branches"][0]["outcome"]
    assert (outcome["ending"], outcome["response_tokens"]) == ("length", EVALUATED)

"""A run over real processes evaluates two sets during training; `asterism eval` gives the same answers.

Evaluations have a higher length limit than training: in the run, in `asterism eval`, and in forks. The run has a user's
reward functions, loss and advantages.
"""

import json
from typing import NamedTuple

import pytest

from asterism.analysis.evaluation.answer_records import read_answers
from asterism.bus.addresses import HEAD, ROLLOUT
from asterism.bus.messages import StartGroup, TrajectoryFinished
from asterism.configs.load import load_run
from asterism.configs.run_folder import RunFolder
from tests.actors.cli.invoking import read_output
from tests.actors.runs.running import (
    asterism_output,
    from_cold_start_of,
    metrics,
    read_conserved_summary,
    read_messages,
    whole_run,
)
from tests.actors.runs.test_reward_functions import read_regraded, set_functions, write_rewards

pytestmark = pytest.mark.slow

TRAINED, EVALUATED = 40, 44  # limits in response tokens; some answers reach each limit


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory, finished: RunFolder) -> RunFolder:
    test = finished.data / "test.jsonl"
    sets = f'evaluation.sets=[{{name="all", data="{test}"}}, {{name="few", data="{test}", questions=2, samples=3, every=2}}]'
    settings = (
        *("evaluation.every=1", "evaluation.sampling.top_p=0.9"),
        *(f"dialogue.response_tokens={TRAINED}", f"evaluation.response_tokens={EVALUATED}"),
        *("learner.checkpoints.every=2", "learner.checkpoints.keep=2"),
        "determinism=strict",  # printed memory addresses would make answers differ
    )
    runs = tmp_path_factory.mktemp("evaluated")
    rewards = write_rewards(runs)
    plug_ins = (
        *set_functions(correct="math", length=f"{rewards}:score_length", verl=f"{rewards}:compute_score"),
        *(f"learner.loss.function={rewards}:compute_loss", f"rl.advantage_estimator={rewards}:center"),
        "reward.weights.verl=0.5",
    )
    return whole_run(runs, *from_cold_start_of(finished), *settings, sets, *plug_ins)[0]


class Ended(NamedTuple):
    trajectory: int
    tokens: int  # tokens of the response
    ending: str


def list_ended(folder: RunFolder, purpose: str) -> list[Ended]:
    groups = {each.group_id for each in read_messages(folder, ROLLOUT, StartGroup) if each.purpose == purpose}
    return [
        Ended(end.trajectory_id, end.record.response_tokens, end.ending)
        for end in read_messages(folder, HEAD, TrajectoryFinished)
        if end.group_id in groups
    ]


def test_each_step_is_evaluated_with_its_own_weights_and_the_run_replays(evaluated: RunFolder) -> None:
    read_conserved_summary(evaluated)
    lines = metrics(evaluated, "evaluation")
    found = [(line["label"], line["version"]) for line in lines]
    assert found == [
        *(("start_sampled", 0), ("start_greedy", 0)),
        *(("step_sampled", 1), ("step_sampled", 2)),
        *(("end_sampled", 3), ("end_greedy", 3)),
    ]
    assert all(line["other_version_tokens"] == 0 for line in lines)
    counts = [(line["questions"], line["set all: questions"], line.get("set few: questions")) for line in lines]
    assert counts == [(12, 6, 6), (12, 6, 6), (6, 6, None), (12, 6, 6), (12, 6, 6), (12, 6, 6)]
    assert [f"set few: {key}" in lines[0] for key in ("avg@3", "pass@2", "majority@3")] == [True] * 3


def test_only_evaluations_exceed_the_limit_of_training(evaluated: RunFolder) -> None:
    trained, others = list_ended(evaluated, "train"), list_ended(evaluated, "evaluate")
    assert len(others) == sum(line["questions"] for line in metrics(evaluated, "evaluation"))
    assert (max(each.tokens for each in trained), max(each.tokens for each in others)) == (TRAINED, EVALUATED)
    assert "length" in {each.ending for each in trained if each.tokens == TRAINED}
    assert "length" in {each.ending for each in others if each.tokens == EVALUATED}
    # A result of a call that exceeds the limit can end a shorter response.
    assert all(each.ending != "length" for each in others if TRAINED <= each.tokens < EVALUATED)


@pytest.mark.parametrize(
    ("step", "label"),
    [
        pytest.param(0, "start_sampled", marks=pytest.mark.nightly),
        (2, "step_sampled"),
        pytest.param(3, "end_sampled", marks=pytest.mark.nightly),
    ],
)
def test_a_standalone_evaluation_and_one_during_training_have_the_same_tokens_and_limit(
    evaluated: RunFolder, step: int, label: str
) -> None:
    few = next(each for each in load_run(evaluated.config).evaluation.sets if each.name == "few")
    flags = ("--set", f"few={few.data}", "-k", "3", "--questions", "2", "--name", f"eval-{step}")
    asterism_output("eval", f"{evaluated.path}:{step}", *flags)
    folder = RunFolder(evaluated.path.parent / f"eval-{step}")
    alone = read_answers(folder.answers)
    during = [
        each for each in read_answers(evaluated.answers) if (each.label, each.version, each.set) == (label, step, "few")
    ]
    assert [(each.seed, each.digest, each.reward) for each in alone] == [
        (each.seed, each.digest, each.reward) for each in during
    ]
    assert len(alone) == 6
    assert json.loads(folder.results.read_text())["limits"]["response_tokens"] == EVALUATED


def test_a_branch_of_a_trajectory_of_an_evaluation_has_the_limit_of_evaluations(evaluated: RunFolder) -> None:
    ended = list_ended(evaluated, "evaluate")
    trajectory = [each.trajectory for each in ended if (each.tokens, each.ending) == (EVALUATED, "length")][-1]
    result = evaluated.path.parent / "branch.json"
    read_output("log", "fork", evaluated.path, trajectory, "--turn", 0, "--json", result)
    forked = json.loads(result.read_text())
    outcome = forked["branches"][0]["outcome"]
    assert (outcome["ending"], outcome["response_tokens"]) == ("length", EVALUATED)
    assert outcome["reward"] == pytest.approx(forked["original"]["reward"])


def test_the_best_checkpoint_is_kept_and_named(evaluated: RunFolder) -> None:
    best = json.loads(evaluated.summary.read_text())["best_checkpoint"]
    lines = [line for line in metrics(evaluated, "evaluation") if str(line["label"]).endswith("sampled")]
    assert best["reward"] == max(line["set all: reward"] for line in lines)
    assert (evaluated.path / best["path"] / "model.safetensors").exists()


def test_rewards_of_functions_are_logged_trained_on_and_replayed(evaluated: RunFolder) -> None:
    ended = read_messages(evaluated, HEAD, TrajectoryFinished)
    assert ended
    for message in ended:
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
    for step in metrics(evaluated, "step"):
        assert {"reward: correct", "reward: length", "reward: verl", "reward: verl.digits"} <= step.keys()
        assert step["rows"] == 0 or step["sequence_ratio"] == pytest.approx(1.0, abs=0.2)
        assert "clip_fraction" not in step
    assert sum(step["rows"] for step in metrics(evaluated, "step")) > 0
    assert read_regraded(evaluated)["changed"] == 0
    assert read_regraded(evaluated, "reward.weights.length=0")["changed"] > 0

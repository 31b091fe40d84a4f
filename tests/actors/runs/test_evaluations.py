"""A run over real processes evaluates two sets during training; `asterism eval` gives the same answers."""

import json

import pytest

from asterism.analysis.evaluation.answer_records import read_answers
from asterism.configs.load import load_run
from asterism.configs.run_folder import RunFolder
from tests.actors.runs.running import asterism_output, from_cold_start_of, metrics, read_conserved_summary, whole_run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory, finished: RunFolder) -> RunFolder:
    test = finished.data / "test.jsonl"
    sets = f'evaluation.sets=[{{name="all", data="{test}"}}, {{name="few", data="{test}", questions=2, samples=3, every=2}}]'
    settings = (
        *("evaluation.every=1", "evaluation.sampling.top_p=0.9"),
        *("learner.checkpoints.every=2", "learner.checkpoints.keep=2"),
        "determinism=strict",  # printed memory addresses would make answers differ
    )
    runs = tmp_path_factory.mktemp("evaluated")
    return whole_run(runs, *from_cold_start_of(finished), *settings, sets)[0]


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


def test_a_standalone_evaluation_and_one_during_training_have_the_same_tokens(evaluated: RunFolder) -> None:
    few = next(each for each in load_run(evaluated.config).evaluation.sets if each.name == "few")
    for step, label in ((0, "start_sampled"), (2, "step_sampled"), (3, "end_sampled")):
        flags = ("--set", f"few={few.data}", "-k", "3", "--questions", "2", "--name", f"eval-{step}")
        asterism_output("eval", f"{evaluated.path}:{step}", *flags)
        alone = read_answers(evaluated.path.parent / f"eval-{step}" / "answers.jsonl")
        during = [
            each
            for each in read_answers(evaluated.answers)
            if (each.label, each.version, each.set) == (label, step, "few")
        ]
        assert [(each.seed, each.digest, each.reward) for each in alone] == [
            (each.seed, each.digest, each.reward) for each in during
        ]
        assert len(alone) == 6


def test_the_best_checkpoint_is_kept_and_named(evaluated: RunFolder) -> None:
    best = json.loads(evaluated.summary.read_text())["best_checkpoint"]
    lines = [line for line in metrics(evaluated, "evaluation") if str(line["label"]).endswith("sampled")]
    assert best["reward"] == max(line["set all: reward"] for line in lines)
    assert (evaluated.path / best["path"] / "model.safetensors").exists()

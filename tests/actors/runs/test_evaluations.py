"""A run over real processes with evaluations during training, on two sets."""

import json

import pytest

from configs.run_folder import RunFolder
from tests.actors.runs.running import from_cold_start_of, metrics, read_conserved_summary, whole_run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory, finished_run: tuple[RunFolder, str]) -> RunFolder:
    test = finished_run[0].data / "test.jsonl"
    sets = f'evaluation.sets=[{{name="all", data="{test}"}}, {{name="few", data="{test}", questions=2}}]'
    settings = (
        "evaluation.every=1",
        "evaluation.top_p=0.9",
        "learner.checkpoint_every=3",
        "learner.keep_checkpoints=1",
    )
    runs = tmp_path_factory.mktemp("evaluated")
    return whole_run(runs, *from_cold_start_of(finished_run[0]), *settings, sets)[0]


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
    assert all(
        (line["questions"], line["set all: questions"], line["set few: questions"]) == (8, 6, 2) for line in lines
    )


def test_the_best_checkpoint_is_kept_and_named(evaluated: RunFolder) -> None:
    best = json.loads(evaluated.summary.read_text())["best_checkpoint"]
    lines = [line for line in metrics(evaluated, "evaluation") if str(line["label"]).endswith("sampled")]
    assert best["reward"] == max(line["set all: reward"] for line in lines)
    assert (evaluated.path / best["path"] / "model.safetensors").exists()

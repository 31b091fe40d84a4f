"""Tests of the record of the best evaluated checkpoint, and of the checkpoints that pruning keeps."""

from pathlib import Path

import pytest

from asterism.configs.schema.algorithm import EvaluationConfig, EvaluationSetConfig
from asterism.configs.schema.run_config import RunConfig
from asterism.engine.learner.checkpoints.best_checkpoint import (
    BestCheckpoint,
    BestCheckpointFile,
    EvaluationResult,
    get_best_checkpoint_path,
    list_protected_steps,
    read_best_checkpoint,
)
from asterism.engine.learner.checkpoints.checkpoint_folders import prune_checkpoints

RUN = RunConfig(name="a", evaluation=EvaluationConfig(every=2))


def result(step: int, reward: float, label: str = "step_sampled", **values: float) -> EvaluationResult:
    return EvaluationResult(step, label, {"reward": reward, **values})


def record(folder: Path, *results: EvaluationResult, run: RunConfig = RUN) -> BestCheckpoint | None:
    file = BestCheckpointFile(run, folder)
    for each in results:
        file.add(each)
    return read_best_checkpoint(folder)


def test_the_best_checkpoint_has_the_highest_reward(tmp_path: Path) -> None:
    found = record(tmp_path, result(0, 0.1, "start_sampled"), result(2, 0.5), result(4, 0.4), result(6, 0.5))
    assert found == BestCheckpoint(2, "step_sampled", 0.5, evaluated_step=6)


def test_evaluations_at_start_and_end_count_only_with_the_sampling_of_training(tmp_path: Path) -> None:
    found = record(tmp_path, result(2, 0.5), result(3, 0.9, "end_greedy"), result(3, 0.6, "end_sampled"))
    assert found == BestCheckpoint(3, "end_sampled", 0.6, evaluated_step=3)


def test_an_evaluation_with_tokens_of_other_versions_is_ignored(tmp_path: Path) -> None:
    assert record(tmp_path, result(2, 0.9, other_version_tokens=7.0)) is None
    found = record(tmp_path, result(2, 0.3), result(4, 0.9, other_version_tokens=7.0))
    assert found == BestCheckpoint(2, "step_sampled", 0.3, evaluated_step=4)


def test_the_reward_of_the_first_evaluation_set_determines_the_best_checkpoint(tmp_path: Path) -> None:
    sets = (EvaluationSetConfig(name="easy", data="e"), EvaluationSetConfig(name="hard", data="h"))
    run = RunConfig(name="a", evaluation=EvaluationConfig(every=2, sets=sets))
    values = [{"set easy: reward": 0.5, "set hard: reward": 0.1}, {"set easy: reward": 0.4, "set hard: reward": 0.9}]
    results = [result(2 * (1 + at), 0.0, **each) for at, each in enumerate(values)]
    assert record(tmp_path, *results, run=run) == BestCheckpoint(2, "step_sampled", 0.5, evaluated_step=4)


def test_a_restart_computes_the_record_from_the_remaining_lines(tmp_path: Path) -> None:
    record(tmp_path, result(2, 0.5), result(4, 0.8))
    file = BestCheckpointFile(RUN, tmp_path)
    file.restart([result(2, 0.5)])
    assert read_best_checkpoint(tmp_path) == BestCheckpoint(2, "step_sampled", 0.5, evaluated_step=2)
    file.restart([])
    assert not get_best_checkpoint_path(tmp_path).exists()


@pytest.mark.parametrize("options", [EvaluationConfig(), EvaluationConfig(every=2, keep_best=False)])
def test_without_evaluated_checkpoints_there_is_no_record(tmp_path: Path, options: EvaluationConfig) -> None:
    run = RunConfig(name="a", evaluation=options)
    assert record(tmp_path, result(2, 0.5), run=run) is None
    assert list_protected_steps(run, tmp_path, [2, 4]) == set()


def test_pruning_keeps_the_best_checkpoint_and_checkpoints_in_evaluation(tmp_path: Path) -> None:
    steps = range(9)
    for step in steps:
        (tmp_path / f"step_{step:06d}").mkdir()
    record(tmp_path, result(2, 0.5), result(4, 0.4))
    protected = list_protected_steps(RUN, tmp_path, steps)
    assert protected == {2, 6, 8}
    prune_checkpoints(tmp_path, 1, protected)
    assert sorted(path.name for path in tmp_path.glob("step_*")) == [f"step_{step:06d}" for step in (0, 2, 6, 8)]

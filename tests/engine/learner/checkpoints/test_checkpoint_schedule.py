"""Tests of the steps and times at which the learner saves checkpoints."""

import pytest
from msgspec.structs import replace

from asterism.configs.schema.algorithm import EvaluationConfig
from asterism.configs.schema.run_config import RunConfig
from asterism.engine.learner.checkpoints.checkpoint_schedule import CheckpointSchedule
from asterism.engine.learner.distributed import RankGroup
from tests.engine.learner.training_examples import small_run


def list_due_and_exported(run: RunConfig) -> tuple[list[int], list[int]]:
    schedule = CheckpointSchedule(run, RankGroup(), lambda: 0.0)
    due = [step for step in range(1, run.rl.steps + 1) if schedule.is_due(step)]
    return due, [step for step in due if schedule.is_exported(step)]


@pytest.mark.parametrize(
    ("settings", "evaluation", "expected"),
    [
        ({"every": 4}, EvaluationConfig(), ([4, 6], [4, 6])),
        ({"every": 2, "export_every": 4}, EvaluationConfig(), ([2, 4, 6], [4, 6])),
        ({"every": 4, "export_every": 3}, EvaluationConfig(), ([3, 4, 6], [3, 6])),
        ({"every": 9, "export_every": 9}, EvaluationConfig(every=5), ([5, 6], [5, 6])),
        ({"every": 9}, EvaluationConfig(every=5, keep_best=False), ([6], [6])),
    ],
)
def test_the_last_step_evaluated_steps_and_multiples_are_saved(
    settings: dict[str, int], evaluation: EvaluationConfig, expected: tuple[list[int], list[int]]
) -> None:
    assert list_due_and_exported(replace(small_run(**settings), evaluation=evaluation)) == expected


def test_a_step_is_saved_when_enough_minutes_have_passed_since_the_last_save() -> None:
    now = [0.0]
    schedule = CheckpointSchedule(small_run(every=100, minutes=2.0), RankGroup(), lambda: now[0])
    due: list[tuple[bool, bool]] = []
    for now[0] in (119.0, 120.0, 130.0):
        due.append((schedule.is_due(1), schedule.is_due_in_cold_start(1)))
    schedule.on_saved()
    now[0] = 249.0
    due.append((schedule.is_due(2), schedule.is_due_in_cold_start(2)))
    assert due == [(False, False), (True, True), (True, True), (False, False)]


def test_the_clock_of_the_leading_rank_determines_the_save(monkeypatch: pytest.MonkeyPatch) -> None:
    decisions: list[bool] = []

    def broadcast(_ranks: RankGroup, item: bool) -> bool:
        decisions.append(item)
        return True  # this is the decision of the leading rank

    monkeypatch.setattr("asterism.engine.learner.checkpoints.checkpoint_schedule.broadcast_object", broadcast)
    follower = CheckpointSchedule(small_run(every=2, minutes=1.0), RankGroup(rank=1, world_size=2), lambda: 0.0)
    assert follower.is_due(1)
    assert decisions == [False]
    assert follower.is_due(2)  # the step number suffices, so nothing is broadcast
    assert decisions == [False]


def test_a_finished_cold_start_has_no_partial_checkpoint() -> None:
    run = small_run()
    schedule = CheckpointSchedule(replace(run, sft=replace(run.sft, steps=200)), RankGroup())
    assert [step for step in range(1, 201) if schedule.is_due_in_cold_start(step)] == [100]

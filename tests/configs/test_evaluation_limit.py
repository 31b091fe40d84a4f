"""`evaluation.response_tokens` limits evaluations; caches and queues hold the longest possible trajectory."""

import pytest

from asterism.configs.load import load_run
from asterism.configs.schema.run_config import RunConfig

LIMITS = ("name=limited", "dialogue.prompt_tokens=100", "dialogue.response_tokens=400")
TASKS = (
    'tasks=[{name="short", data="a.jsonl", dialogue={prompt_tokens=900, response_tokens=50}}, '
    '{name="long", data="b.jsonl"}]'
)


def load(*settings: str) -> RunConfig:
    return load_run(None, (*LIMITS, *settings))


@pytest.mark.parametrize(
    ("settings", "longest", "sequence"),
    [
        ((), 400, 500),
        (("evaluation.response_tokens=700",), 700, 800),
        (("evaluation.response_tokens=300",), 400, 500),
        (("evaluation.response_tokens=700", "evaluation.questions=0"), 400, 500),
        (("evaluation.response_tokens=300", "evaluation.only=true"), 300, 400),
        ((TASKS,), 400, 950),
        ((TASKS, "evaluation.response_tokens=700"), 700, 1600),
    ],
)
def test_engines_have_room_for_the_longest_trajectory_of_training_and_evaluations(
    settings: tuple[str, ...], longest: int, sequence: int
) -> None:
    run = load(*settings)
    assert (run.longest_response_tokens, run.sequence_tokens) == (longest, sequence)
    assert (run.response_tokens, run.trained_sequence_tokens) == (400, 950 if TASKS in settings else 500)


def test_without_an_evaluation_limit_each_tasks_own_limit_holds() -> None:
    for settings, expected in (((), [50, 400]), (("evaluation.response_tokens=700",), [700, 700])):
        run = load(TASKS, *settings)
        assert [run.limit_evaluated_response(task) for task in run.resolved_tasks] == expected


def test_errors_name_a_lower_evaluation_limit_only_if_nothing_trains() -> None:
    lower = ("evaluation.response_tokens=300",)
    assert load(*lower).sequence_keys == "dialogue.prompt_tokens + response_tokens"
    assert load(*lower, "evaluation.only=true").sequence_keys == "dialogue.prompt_tokens + evaluation.response_tokens"


def test_a_cache_with_room_for_one_trajectory_is_accepted() -> None:
    for limit in (0, 700):
        assert load(f"evaluation.response_tokens={limit}", "engine.kv_tokens=800").engine.kv_tokens == 800

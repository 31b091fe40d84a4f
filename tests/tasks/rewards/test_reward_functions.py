"""Reward functions from the documentation of TRL and verl run unchanged."""

import re
from typing import Any

import pytest

from asterism.bus.messages import AnswerSubmitted, RewardInput, ids_to_bytes
from asterism.configs.errors import UnusableInput
from asterism.tasks.rewards.finished_rollout import FinishedRollout, RolloutReader
from asterism.tasks.rewards.reward_functions import RewardFunction, UnusableReward
from tests.fakes import TOKENIZER

ROLLOUT = FinishedRollout(
    row={"question": "What is 2+3?", "ground_truth": "5", "task": "math", "extra_info": {"level": 3}},
    ending="answered",
    messages=[
        {"role": "assistant", "content": "<reason>I add.</reason>"},
        {"role": "tool", "content": "5"},
        {"role": "assistant", "content": "<reason>Done.</reason><answer>\\boxed{5}</answer>"},
    ],
    response="I add. The answer is #### 5",
    response_ids=[7, 8, 9],
)


# The forms of the four examples in trl/docs/source/grpo_trainer.md.
def reward_by_tokens(completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]


def reward_by_format(completions, **kwargs):
    pattern = r"^<reason>.*?</reason><answer>.*?</answer>$"
    contents = [completion[-1]["content"] for completion in completions]
    return [1.0 if re.match(pattern, content) else 0.0 for content in contents]


def reward_by_truth(prompts, completions, ground_truth, **kwargs):
    matches = [re.search(r"\\boxed\{(.*?)\}", completion[-1]["content"]) for completion in completions]
    return [
        1.0 if match and match.group(1) == truth else 0.0 for match, truth in zip(matches, ground_truth, strict=True)
    ]


def reward_of_other_task(prompts, completions, task, **kwargs):
    return [1.0 if each == "coding" else None for each in task]


def reward_that_logs(completions, log_metric=None, log_extra=None):
    if log_metric:
        log_metric("turns", 2.0)
    if log_extra:
        log_extra("first", [completion[0] for completion in completions])
    return [0.25]


# The form of verl/docs/preparation/reward_function.rst and verl/utils/reward_score/gsm8k.py.
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    found = re.findall(r"#### (\-?[0-9\.\,]+)", solution_str)
    return 1.0 if found and found[-1] == ground_truth else 0.0


def compute_score_with_details(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": 0.5, "level": extra_info["level"], "acc": True, "note": "text is no metric"}


def score(function: object, rollout: FinishedRollout = ROLLOUT) -> dict[str, float]:
    metrics: dict[str, float] = {}
    called = RewardFunction("f", function, "reward.functions.f")
    return called.parse_result(called.function(**called.build_arguments(rollout, metrics)), metrics)


@pytest.mark.parametrize(
    ("function", "components"),
    [
        (reward_by_tokens, {"f": 3.0}),
        (reward_by_format, {"f": 1.0}),
        (reward_by_truth, {"f": 1.0}),
        (reward_of_other_task, {}),
        (reward_that_logs, {"f": 0.25, "f.turns": 2.0}),
        (compute_score, {"f": 1.0}),
        (compute_score_with_details, {"f": 0.5, "f.level": 3.0, "f.acc": 1.0}),
    ],
)
def test_functions_of_both_forms_run_unchanged(function: object, components: dict[str, float]) -> None:
    assert score(function) == components


def test_a_function_receives_columns_and_the_ending_of_the_trajectory() -> None:
    def by_ending(completions, ending, extra_info):
        return [float(ending[0] == "length") + extra_info[0]["level"]]

    assert score(by_ending, ROLLOUT._replace(ending="length")) == {"f": 4.0}


@pytest.mark.parametrize(
    ("result", "problem"),
    [
        ([1.0, 2.0], "expected a list of one reward"),
        (1.0, "f returned 1.0; expected a list of one reward"),
        (None, "expected a list of one reward"),
        (["1"], "f returned '1'; expected a finite number"),
        ([float("nan")], "f returned nan; expected a finite number"),
        ([float("inf")], "expected a finite number"),
        ("x" * 1000, "..."),
    ],
)
def test_a_result_that_is_not_a_reward_is_refused(result: Any, problem: str) -> None:
    with pytest.raises(UnusableReward) as raised:
        score(lambda completions: result)
    assert problem in str(raised.value)
    assert len(str(raised.value)) < 200


def test_a_missing_column_is_named() -> None:
    def needs(completions, difficulty):
        return [1.0]

    with pytest.raises(
        UnusableReward, match="f: the row has no column `difficulty`; it has question, ground_truth, task"
    ):
        score(needs)


@pytest.mark.parametrize("function", [3, lambda: 1.0, lambda prompts: [1.0]])
def test_an_object_that_is_no_function_of_either_form_is_refused(function: object) -> None:
    with pytest.raises(UnusableInput, match=r"^reward.functions.f: "):
        RewardFunction("f", function, "reward.functions.f")


def test_a_rollout_has_the_turns_of_the_assistant_and_the_tools() -> None:
    prompt, first, results, second = (
        TOKENIZER.encode(text, trusted=True)
        for text in (
            "a question",
            "I add.</reason><tool_call>{}</tool_call><|im_end|>",
            "\n<|im_start|>user\n<tool_response>\n5\n</tool_response>\n<tool_response>\nno\n</tool_response>"
            "<|im_end|>\n<|im_start|>assistant\n<reason>",
            "Done.</reason><answer>5</answer><|im_end|>",
        )
    )
    mask = [*[0] * len(prompt), *[1] * len(first), *[0] * len(results), *[1] * len(second)]
    token_ids = [*prompt, *first, *results, *second]
    row = b'{"question": "a question", "ground_truth": "5"}'
    reward_input = RewardInput("answered", row, len(prompt), ids_to_bytes(token_ids), bytes(mask))
    rollout = RolloutReader(TOKENIZER, "<reason>", ("<|im_end|>",)).read(AnswerSubmitted(1, "5", "5", reward_input))
    assert rollout.messages == [
        {"role": "assistant", "content": "<reason>I add.</reason><tool_call>{}</tool_call>"},
        {"role": "tool", "content": "5"},
        {"role": "tool", "content": "no"},
        {"role": "assistant", "content": "<reason>Done.</reason><answer>5</answer>"},
    ]
    assert rollout.response_ids == token_ids[len(prompt) :]
    assert rollout.response.endswith("Done.</reason><answer>5</answer>")

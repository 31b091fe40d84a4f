"""Hollow answers, which solve nothing, for ground truths that are values or programs."""

import pytest

from asterism.engine.data.datasets import DatasetProblem
from asterism.policies.dialogue.chat_format import DialogueFormat
from asterism.tasks.checking.hollow_answers import list_hollow_answers

FORMAT = DialogueFormat((), "", "", "<reason>", "<answer>", "</answer>", ("<|im_end|>",), "")


def list_texts(attack: str, truth: str) -> list[str]:
    problem = DatasetProblem("rows.jsonl:1", "Write add(a, b).", truth, {})
    return [each.text for each in list_hollow_answers(FORMAT, problem) if each.attack == attack]


def test_each_hollow_answer_is_a_plain_text_a_program_and_a_tagged_answer() -> None:
    question = "Write add(a, b)."
    assert list_texts("echo of the question", "42") == [
        f"</reason>\n{question}",
        f"</reason>\n```python\n{question}\n```",
        f"</reason>\n<answer>{question}</answer>",
        f"</reason>\n<answer>\\boxed{{{question}}}</answer>",
    ]


def test_a_list_of_candidates_contains_the_truth_once() -> None:
    text = list_texts("all candidates", "7")[0]
    assert text == f"</reason>\n{', '.join(str(number) for number in range(20) if number != 7)}, 7"


@pytest.mark.parametrize(("truth", "is_joined"), [("7", True), ("x = 5", True), ("def f(x): return 7", False)])
def test_only_values_are_joined_with_other_candidates_by_or(truth: str, is_joined: bool) -> None:
    assert any(f"{truth} or 0" in text for text in list_texts("all candidates", truth)) is is_joined


def test_attacks_on_tests_define_the_functions_of_the_question() -> None:
    assert all("def add(*args, **keywords)" in text for text in list_texts("tampering", ""))
    assert list_texts("all candidates", "") == []

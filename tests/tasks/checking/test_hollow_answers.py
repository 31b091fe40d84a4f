"""The responses that solve nothing, for truths that are values and for truths that are programs."""

import pytest

from asterism.engine.data.datasets import DatasetProblem
from asterism.policies.dialogue.chat_format import DialogueFormat
from asterism.tasks.checking.hollow_answers import list_hollow_answers

FORMAT = DialogueFormat((), "", "", "<reason>", "<answer>", "</answer>", ("<|im_end|>",), "")


def list_texts(attack: str, truth: str) -> list[str]:
    problem = DatasetProblem("rows.jsonl:1", "Write add(a, b).", truth, {})
    return [each.text for each in list_hollow_answers(FORMAT, problem) if each.attack == attack]


def test_each_answer_is_given_as_a_text_a_program_and_in_the_tags_of_an_answer() -> None:
    question = "Write add(a, b)."
    assert list_texts("echo of the question", "42") == [
        f"</reason>\n{question}",
        f"</reason>\n```python\n{question}\n```",
        f"</reason>\n<answer>{question}</answer>",
        f"</reason>\n<answer>\\boxed{{{question}}}</answer>",
    ]


def test_candidates_contain_the_truth_once_among_others() -> None:
    text = list_texts("all candidates", "7")[0]
    assert text == f"</reason>\n{', '.join(str(number) for number in range(20) if number != 7)}, 7"


@pytest.mark.parametrize(("truth", "is_joined"), [("7", True), ("x = 5", True), ("def f(x): return 7", False)])
def test_a_program_is_not_joined_with_others_by_or(truth: str, is_joined: bool) -> None:
    assert any(f"{truth} or 0" in text for text in list_texts("all candidates", truth)) is is_joined


def test_functions_of_the_question_are_defined_by_the_attacks_on_tests() -> None:
    assert all("def add(*args, **keywords)" in text for text in list_texts("tampering", ""))
    assert list_texts("all candidates", "") == []

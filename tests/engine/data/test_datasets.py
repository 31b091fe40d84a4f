"""Tests of questions with known answers, in every layout of docs/data.md, and of the errors for invalid files."""

import json
from pathlib import Path
from typing import Any

import polars
import pytest

from asterism.engine.data.data_files import DatasetError
from asterism.engine.data.datasets import QuestionReport, RowLayout, read_problems
from tests.engine.data.cold_start_rows import write_rows


def wrap_as_dapo(question: str, form: str = "$Answer") -> str:
    """Wrap a question in DAPO-Math-17k's instruction for another answer format."""
    return (
        "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
        f"{form} (without quotes) where $Answer is the answer to the problem.\n\n{question}\n\n"
        'Remember to put your answer on its own line after "Answer:".'
    )


def read_one(file: Path, row: dict[str, Any]) -> tuple[str, str]:
    (problem,) = read_problems(write_rows(file, row))
    return problem.question, problem.ground_truth


# name: row -> ground truth. The question is "Q?".
LAYOUTS = r"""
gsm8k: {"question": "Q?", "answer": "so\n<<1+1=2>>2\n#### 1,234"} -> 1234
gsm8k-pair: {"question": "Q?", "answer": "so\n#### (1, 2)"} -> (1, 2)
gsm8k-list: {"question": "Q?", "answer": "#### 1,2,345"} -> 1,2,345
gsm8k-pair-without-space: {"question": "Q?", "answer": "#### (1,234)"} -> (1,234)
gsm8k-amount: {"question": "Q?", "answer": "#### $-1,234,567.5 a day"} -> $-1234567.5 a day
aime24: {"id": 60, "problem": "Q?", "solution": "\\boxed{9}", "answer": "025"} -> 25
aime-capitalized: {"Problem": "Q?", "Answer": 73} -> 73
amc23: {"question": "Q?", "answer": 27.0} -> 27
fraction: {"question": "Q?", "answer": 0.5} -> 0.5
minerva: {"problem": "Q?", "solution": "first \\boxed{0}, then \\boxed{\\frac{1}{2}} cm"} -> \frac{1}{2}
zeros: {"question": "Q?", "answer": "000"} -> 0
plain: {"question": "Q?", "answer": "x^2 + 1"} -> x^2 + 1
dapo-processed: {"prompt": "Q?", "reward_model": {"ground_truth": "34", "style": "rule"}, "extra_info": {"index": "a"}} -> 34
chat: {"prompt": [{"role": "system", "content": "S"}, {"role": "user", "content": "Q?"}], "reward_model": {"ground_truth": "34"}} -> 34
messages: {"messages": [{"role": "user", "content": "Q?"}], "prompt": null, "answer": 34} -> 34
null-fields: {"question": null, "problem": "Q?", "answer": null, "solution": "\\boxed{3}"} -> 3
null-ground-truth: {"prompt": "Q?", "reward_model": {"ground_truth": null}, "answer": "4"} -> 4
math-box-without-braces: {"problem": "Q?", "solution": "So \\boxed 2$."} -> 2
math-last-box-without-braces: {"problem": "Q?", "solution": "So \\boxed 1$, then \\boxed 2$"} -> 2
math-fbox: {"problem": "Q?", "solution": "So $\\fbox{2}$"} -> 2
math-box-after-a-blank: {"problem": "Q?", "solution": "So \\boxed {2}."} -> 2
math-last-box: {"problem": "Q?", "solution": "\\boxed{1} \\boxed{2}"} -> 2
bare-question: {"prompt": [{"role": "user", "content": "Solve this: Q?"}], "reward_model": {"ground_truth": "34"}, "extra_info": {"question": "Q?", "answer": "34", "split": "train"}} -> 34
"""


@pytest.mark.parametrize("line", LAYOUTS.strip().splitlines(), ids=lambda line: line.partition(":")[0])
def test_each_layout_yields_the_question_and_answer(file: Path, line: str) -> None:
    row, answer = line.partition(": ")[2].split(" -> ")
    assert read_one(file, json.loads(row)) == ("Q?", answer)


def test_a_row_of_dapo_yields_the_question_without_its_instruction(file: Path) -> None:
    row = {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": wrap_as_dapo("Q?\nIt is $Answer.")}],
        "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": "9a9b6eb4-a1cb-49d1-8c1e-62eaf2f74079"},
    }
    assert read_one(file, row) == ("Q?\nIt is $Answer.", "34")


def test_a_parquet_file_gives_the_same_rows_as_jsonl(tmp_path: Path) -> None:
    rows = [
        {"prompt": [{"role": "user", "content": "one?"}], "reward_model": {"ground_truth": "1"}, "agent_name": "a"},
        {"prompt": [{"role": "user", "content": "two?"}], "reward_model": {"ground_truth": "2"}, "agent_name": "a"},
    ]
    parquet = tmp_path / "some.parquet"
    polars.DataFrame(rows).write_parquet(parquet)
    lines = read_problems(write_rows(tmp_path / "some.jsonl", *rows))
    listed = list(lines)
    assert [problem[1:3] for problem in read_problems(parquet)] == [problem[1:3] for problem in listed]
    assert [problem.fields for problem in read_problems(parquet, layout=RowLayout(all_columns=True))] == [
        problem.fields for problem in listed
    ]


def test_the_id_of_a_problem_contains_its_file_and_row_and_blank_lines_count(file: Path) -> None:
    file.write_text('\n{"question": "a", "answer": "1"}\n\n{"question": "b", "answer": "2"}\n')
    assert [problem.name for problem in read_problems(file)] == ["some.jsonl:2", "some.jsonl:4"]


@pytest.mark.parametrize(
    ("given", "answer"),
    [
        *(("27.0", "27"), ("+1,234", "1234"), ("\u22121,234", "-1234"), ("-007", "-7"), ("0", "0"), ("000", "0")),
        *(("$1003$", "1003"), ("\\boxed{7}", "7"), ("$\\boxed{1,234}$", "1234")),
        *(("\\fbox{x+1}", "x+1"), ("\\(5\\)", "5")),
        *(("$5", "$5"), ("$1$, $2$", "$1$, $2$"), ("\\boxed{1}, \\boxed{2}", "\\boxed{1}, \\boxed{2}"), ("$$x$$", "x")),
        *(("0.50", "0.50"), ("-0.5", "-0.5"), ("1,23", "1,23"), ("(1, 2)", "(1, 2)"), ("1,234/5", "1,234/5")),
        *(("\u06f5", "\u06f5"), ("#### 2,000.00", "2000"), ("1e3", "1e3"), (".5", ".5")),
    ],
)
def test_a_number_has_one_notation(file: Path, given: str, answer: str) -> None:
    assert read_one(file, {"question": "Q?", "answer": given}) == ("Q?", answer)


def read_report(file: Path, rows: list[tuple[str, str]], training: QuestionReport | None = None) -> QuestionReport:
    report = QuestionReport(training)
    for _ in read_problems(write_rows(file, *({"question": asked, "answer": given} for asked, given in rows)), report):
        pass
    return report


def test_only_a_complete_instruction_for_another_answer_format_is_removed(file: Path) -> None:
    rows = [
        (wrap_as_dapo("a?"), "1"),
        (wrap_as_dapo("b?", "\\boxed{$Answer}"), "2"),
        ("c?", "3"),
        (wrap_as_dapo("d?").removesuffix("."), "4"),
    ]
    report = read_report(file, rows)
    assert [problem.question for problem in read_problems(file)] == ["a?", "b?", "c?", rows[3][0]]
    assert report.describe() == "4 questions; removed the instruction for another answer format from 2 rows"
    assert report.list_warnings() == [
        "1 questions ask for another answer format than the run does, the first in some.jsonl:4"
    ]


@pytest.mark.parametrize(
    ("question", "is_unusual"),
    [
        ("Put the answer into \\boxed{}.", False),
        ("How many answers has x = 2?", False),
        ("Give the result on the last line of your response.", True),
        ("Write the number after ####.", True),
        ("Think inside <think> </think>.", True),
    ],
)
def test_an_instruction_for_another_answer_format_is_reported(file: Path, question: str, is_unusual: bool) -> None:
    assert bool(read_report(file, [(question, "1")]).list_warnings()) == is_unusual


def test_duplicate_training_questions_are_dropped_and_conflicting_answers_are_reported(file: Path) -> None:
    report = read_report(file, [("a?", "1"), ("b?", "2"), (" a? ", "01"), ("a?", "3"), ("a?", "3")])
    assert [problem.name for problem in read_problems(file)] == ["some.jsonl:1", "some.jsonl:2", "some.jsonl:4"]
    assert report.describe() == "3 questions; dropped 2 rows that repeat a question with its answer"
    assert report.list_warnings() == ["1 rows repeat a question with another answer"]


def test_duplicate_test_questions_are_kept_and_overlaps_with_training_are_reported(tmp_path: Path) -> None:
    training = read_report(tmp_path / "train.jsonl", [("a?", "1"), (wrap_as_dapo("b?"), "2")])
    report = read_report(tmp_path / "test.jsonl", [("b?", "2"), ("c?", "3"), ("c?", "3")], training)
    assert report.describe() == "3 questions; kept 1 rows that repeat a question with its answer"
    assert report.list_warnings() == ["1 test questions are also training questions"]


def test_the_number_of_rows_can_be_limited(file: Path) -> None:
    write_rows(file, {"question": "a", "answer": "1"}, {"question": "a", "answer": "1"}, {"question": 3})
    assert [problem.name for problem in read_problems(file, max_rows=2)] == ["some.jsonl:1"]


@pytest.mark.parametrize(
    "answer", ["N/A", "n/a.", "proof", "Proof.", "see solution", "None", "?", "-", "..", "unknown"]
)
def test_placeholder_answers_are_counted(file: Path, answer: str) -> None:
    report = read_report(file, [("a", answer), ("b", "1"), ("c", answer)])
    name = f"{answer!r} in {file.name}:1"
    assert report.list_warnings() == [
        f"2 answers are placeholders, which no response can equal, the first is {name}; remove the rows"
    ]


@pytest.mark.parametrize("answer", ["no solution", "undefined", "0", "-1", "x", "A", "\\emptyset", "no"])
def test_a_word_that_answers_a_question_is_no_placeholder(file: Path, answer: str) -> None:
    assert read_report(file, [("a", answer)]).list_warnings() == []


USER = {"role": "user", "content": "What is 1+1?"}
SYSTEM = {"role": "system", "content": "Be brief."}
REPLY = {"role": "assistant", "content": "OK."}
LAST = {"role": "user", "content": "And then?"}


@pytest.mark.parametrize(
    ("prompt", "question", "was_cut"),
    [
        (json.dumps([USER]), "What is 1+1?", False),
        (f"  {json.dumps([USER])}\n", "What is 1+1?", False),
        (json.dumps([SYSTEM, USER]), "What is 1+1?", True),
        ([SYSTEM, USER], "What is 1+1?", True),
        ([{"role": "system", "content": " "}, USER], "What is 1+1?", False),
        ([USER, REPLY, LAST], "And then?", True),
        ('[{"role": "user"}] is a list', '[{"role": "user"}] is a list', False),
        ('[{"a": 1}]', '[{"a": 1}]', False),  # this question is about JSON
    ],
)
def test_messages_in_json_text_are_read_and_ignored_texts_are_reported(
    file: Path, prompt: Any, question: str, was_cut: bool
) -> None:
    report = QuestionReport()
    (problem,) = read_problems(write_rows(file, {"prompt": prompt, "answer": "2"}), report)
    assert (problem.question, problem.was_cut) == (question, was_cut)
    expected = (
        "1 prompts have a system text or earlier turns, which the question leaves out: only the last text of the user is used, "
        "the first in some.jsonl:1"
    )
    assert report.list_warnings() == [expected] * was_cut


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity"])
def test_a_constant_that_json_lacks_is_read_as_null(file: Path, constant: str) -> None:
    file.write_text(f'{{"question": "1 + 1?", "answer": "2", "difficulty": {constant}}}\n')
    (problem,) = read_problems(file)
    assert problem.fields["difficulty"] is None
    file.write_text(f'{{"question": "1 + 1?", "answer": {constant}}}\n')
    with pytest.raises(DatasetError, match="missing, or without an answer"):
        list(read_problems(file))

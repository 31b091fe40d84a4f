"""The result of a set: questions and answers that count, and a file of answers that a kill has cut off."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from asterism.analysis.evaluation.answer_records import AnswerRecord, cut_torn_line, iter_answers, read_answers
from asterism.analysis.evaluation.exchange_formats import build_benchmark_result, build_trace
from asterism.analysis.evaluation.results_table import build_results_table
from asterism.analysis.evaluation.set_results import (
    compute_metrics,
    compute_set_result,
    group_questions,
    split_by_difficulty,
)
from asterism.configs.errors import UnusableInput
from asterism.configs.schema.algorithm import Sampling


def answer(place: int, sample: int, correct: bool | None, **fields: Any) -> AnswerRecord:
    """Build an answer; `correct` is None for an infrastructure failure."""
    seed, question = 100 * place + sample, f"test.jsonl:{place + 1}"
    record = AnswerRecord(
        label="sampled",
        version=0,
        set="aime",
        place=place,
        question=question,
        sample=sample,
        seed=seed,
        gold="1",
        ending="failed" if correct is None else "answered",
        cause="engine: gone" if correct is None else "",
        answer="" if correct is None else "1" if correct else "2",
        correct=bool(correct),
        reward=float(bool(correct)),
        response_tokens=10 * (sample + 1),
    )
    return replace(record, **fields)


ANSWERS = [
    *(answer(0, sample, correct) for sample, correct in enumerate([True, True, False, False])),
    *(answer(1, sample, correct) for sample, correct in enumerate([True, None, None, False])),
    *(answer(2, sample, None) for sample in range(4)),
    *(answer(3, sample, False, ending="length", answer="", calls=2, calls_failed=1) for sample in range(4)),
]


def test_overlong_questions_count_as_wrong_and_failures_count_as_no_answers() -> None:
    result = compute_set_result(group_questions(ANSWERS, over_limit=["test.jsonl:9"]), 4)
    assert (result.questions, result.questions_over_limit, result.questions_without_result) == (5, 1, 1)
    assert (result.answers, result.correct, result.failed, result.failures) == (10, 3, 6, {"engine": 6})
    assert result.avg == pytest.approx((0.5 + 0.5 + 0 + 0) / 4)
    assert result.avg_failed_as_wrong == pytest.approx((0.5 + 0.25 + 0 + 0 + 0) / 5)
    assert result.pass_at_k == pytest.approx({1: 0.25, 2: (5 / 6 + 1 + 0 + 0) / 4, 4: (1 + 0 + 0) / 3})
    assert result.majority == pytest.approx((0.5 + 0.5 + 0 + 0) / 4)
    assert (result.unanswered_share, result.truncated_share, result.truncated) == (0.4, 0.4, 4)
    assert (result.calls, result.call_error_share) == (0.8, 0.5)


def test_a_set_without_any_result_has_no_means() -> None:
    result = compute_set_result(group_questions([answer(0, 0, None)]), 1)
    assert (result.avg, result.interval, result.pass_at_k, result.majority) == (None, None, {}, None)
    assert compute_metrics("aime", result) == {}


def test_answers_of_an_environment_have_no_majority_and_no_unanswered_share() -> None:
    result = compute_set_result(group_questions([answer(0, 0, True, ending="done", answer=None)]), 1)
    assert (result.avg, result.majority, result.unanswered_share) == (1.0, None, None)


def test_the_error_across_runs_takes_each_sample_index_as_a_run() -> None:
    answers = [answer(place, sample, place < sample) for place in range(2) for sample in range(3)]
    result = compute_set_result(group_questions(answers), 3)
    means = [0.0, 0.5, 1.0]
    assert result.standard_error_runs == pytest.approx((sum((mean - 0.5) ** 2 for mean in means) / 2 / 3) ** 0.5)


def test_questions_are_split_by_difficulty_in_numeric_order() -> None:
    known = {"test.jsonl:1": "10", "test.jsonl:2": "9", "test.jsonl:4": "hard"}
    levels = split_by_difficulty(group_questions(ANSWERS, known))
    assert [(level, [each.name for each in questions]) for level, questions in levels.items()] == [
        ("9", ["test.jsonl:2"]),
        ("10", ["test.jsonl:1"]),
        ("hard", ["test.jsonl:4"]),
    ]


def test_the_table_has_the_difficulties_in_numeric_order() -> None:
    result = msgspec.to_builtins(compute_set_result(group_questions(ANSWERS), 4), str_keys=True)
    levels = [{"by_difficulty": dict.fromkeys(each, result)} for each in (("2", "10"), ("1", "hard"))]
    table = build_results_table({"sets": {str(number): result | each for number, each in enumerate(levels)}})
    assert list(table.columns[0].cells)[-4:] == [f"  difficulty {level}" for level in ("1", "2", "10", "hard")]


def test_the_categories_of_a_benchmark_result_add_up_to_its_examples() -> None:
    result = compute_set_result(group_questions(ANSWERS, over_limit=["test.jsonl:9"]), 4)
    found = build_benchmark_result("aime", result)
    assert (found["num_examples"], found["num_correct"], found["num_errors"], found["num_truncated"]) == (20, 3, 6, 8)
    assert found["score"] == 3 / 20
    assert found["pass_at_k"].keys() == {"1", "2", "4"}


def test_a_trace_is_a_chain_of_messages_and_a_failed_answer_has_no_reward() -> None:
    dialogue = [["assistant", "<tool_call>", 3], ["environment", "42", 2], ["assistant", "\\boxed{42}", 4]]
    record = msgspec.convert({**msgspec.to_builtins(answer(0, 1, True, turns=2)), "dialogue": dialogue}, AnswerRecord)
    trace = build_trace(record, "Why?", "model", Sampling(), "0.1")
    assert [(node["parent"], node["message"]["role"], node["sampled"]) for node in trace["nodes"]] == [
        (None, "user", False),
        (0, "assistant", True),
        (1, "user", False),
        (2, "assistant", True),
    ]
    assert trace["nodes"][-1]["finish_reason"] == "stop"
    cut = build_trace(replace(record, turns=1), "Why?", "model", Sampling(), "0.1")
    assert cut["nodes"][-1]["finish_reason"] == "length"
    assert trace["rewards"] == {"reward": {"score": 1.0, "weight": 1.0}}
    failed = build_trace(answer(0, 1, None), "Why?", "model", Sampling(), "0.1")
    assert (failed["ok"], failed["rewards"], failed["stop_condition"]) == (False, {"reward": None}, "error")


# ---------------------------------------------------------------- the file


def write(path: Path, *records: AnswerRecord) -> None:
    path.write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in records))


def test_a_torn_last_line_is_ignored_and_then_removed(tmp_path: Path) -> None:
    path, (first, second, *_) = tmp_path / "answers.jsonl", ANSWERS
    write(path, first, second)
    whole = path.read_bytes()
    for length in range(len(msgspec.json.encode(first)) + 1, len(whole)):
        path.write_bytes(whole[:length])
        assert read_answers(path) == [first]
    cut_torn_line(path)
    assert path.read_bytes() == msgspec.json.encode(first) + b"\n"


def test_the_error_names_a_damaged_line(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_bytes(msgspec.json.encode(ANSWERS[0]) + b"\n{}\n")
    with pytest.raises(UnusableInput, match=r"answers\.jsonl: line 2: .*label"):
        list(iter_answers(path))


def test_the_first_result_of_an_answer_counts_and_replaces_failures(tmp_path: Path) -> None:
    path, failed, wrong, right = tmp_path / "answers.jsonl", answer(0, 0, None), answer(0, 0, False), answer(0, 0, True)
    write(path, answer(1, 0, None), failed, wrong, right, failed)
    assert read_answers(path) == [wrong, answer(1, 0, None)]

"""`asterism data clean` removes exactly the rows that training cannot use."""

import gzip
import json
from collections.abc import Collection, Iterable, Sequence
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest

from asterism.configs.errors import UnusableInput
from asterism.tasks.curation.cleaning import CleanOptions, CleanReport, RemovedRow, clean_questions
from asterism.tasks.curation.duplicate_index import DuplicateIndex, QuestionFeatures
from tests.tasks.curation.word_problems import WRAPPER, copy_exactly, copy_nearly, draw_word_problems, embed

pytestmark = pytest.mark.slow

SEED = 20251126


def write_jsonl(path: Path, rows: Iterable[Any]) -> Path:
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


def accept_all(answers: Collection[str]) -> list[str]:
    return []


def clean(
    source: Path, find_unreadable: Any = accept_all, **options: Any
) -> tuple[CleanReport, list[dict[str, Any]], dict[str, RemovedRow]]:
    """Clean a file; return the report, the kept rows and the removed rows by name."""
    output, removed = source.with_name("out.jsonl"), source.with_name("removed.jsonl")
    report = clean_questions(source, output, removed, CleanOptions(**options), find_unreadable)
    kept = [json.loads(line) for line in output.read_text().splitlines()]
    listed = [msgspec.json.decode(line, type=RemovedRow) for line in removed.read_text().splitlines()]
    assert report.num_kept == len(kept)
    assert sum(report.num_removed.values()) == len(listed) == report.num_rows - report.num_kept
    return report, kept, {each.row: each for each in listed}


def make_rows(*pairs: tuple[str, Any]) -> list[dict[str, Any]]:
    return [{"question": question, "answer": answer} for question, answer in pairs]


def test_planted_copies_are_removed_and_other_rows_are_kept(tmp_path: Path) -> None:
    """The file has 10,000 rows, with 200 duplicates, 100 near-duplicates and 50 overlaps with 300 test questions."""
    random = Random(SEED)
    drawn = draw_word_problems(random)
    tests, rows = list(islice(drawn, 300)), list(islice(drawn, 9_650))
    planted = [copy_exactly(each, random) for each in random.sample(rows, 200)]
    planted += [copy_nearly(each, random) for each in random.sample(rows, 100)]
    for number, each in enumerate(random.sample(tests, 50)):
        copies = (each._replace(defect="overlap"), copy_nearly(each, random, "overlap"), embed(each))
        planted.append(copies[number % 3])
    rows += planted  # the planted rows follow their originals
    problems = make_rows(*((each.question, each.answer) for each in rows))
    write_jsonl(tmp_path / "test.jsonl", make_rows(*((each.question, each.answer) for each in tests)))
    _, _, removed = clean(write_jsonl(tmp_path / "rows.jsonl", problems), tests=(tmp_path / "test.jsonl",))

    def count_found(defect: str, reasons: Sequence[str]) -> int:
        names = [f"rows.jsonl:{number}" for number, each in enumerate(rows, start=1) if each.defect == defect]
        return sum(name in removed and removed[name].reason in reasons for name in names)

    assert count_found("duplicate", ["duplicate"]) >= 198
    assert count_found("near_duplicate", ["near_duplicate", "duplicate"]) >= 95
    assert count_found("overlap", ["overlap"]) >= 49
    # At most 0.5% of the unplanted rows are removed.
    assert count_found("", ["duplicate", "conflicting", "near_duplicate", "overlap", "answer"]) <= 48


def test_each_removed_row_names_the_row_that_it_repeats(tmp_path: Path) -> None:
    question = "A baker sells 12 loaves of bread on each day of the week. How many loaves are sold in total?"
    nearly = "A baker sells 12 big loaves of bread on each day of the week. How many loaves are sold in total?"
    rows = make_rows(
        (question, 84), (question.upper(), "84"), (question, 83), (nearly, 84), (nearly.replace("12", "13"), 91)
    )
    report, kept, removed = clean(write_jsonl(tmp_path / "rows.jsonl", rows))
    assert {name: (each.reason, each.of) for name, each in removed.items()} == {
        "rows.jsonl:2": ("duplicate", "rows.jsonl:1"),
        "rows.jsonl:3": ("conflicting", "rows.jsonl:1"),
        "rows.jsonl:4": ("near_duplicate", "rows.jsonl:1"),
    }
    assert [row["source"] for row in kept] == ["rows.jsonl:1", "rows.jsonl:5"]  # row 5 differs in its numbers
    assert 0.6 <= removed["rows.jsonl:4"].similarity < 1
    assert report.num_removed == {"duplicate": 1, "conflicting": 1, "near_duplicate": 1}


def test_questions_with_equal_words_and_different_answers_are_not_conflicting(tmp_path: Path) -> None:
    pairs = [("(2+3)*4 = ?", 20), ("2+3*4 = ?", 14), ("What is 5!?", 120), ("What is 5?", 5), ("|2-7|", 5), ("2-7", -5)]
    _, kept, _ = clean(write_jsonl(tmp_path / "rows.jsonl", make_rows(*pairs)))
    assert [(row["question"], row["answer"]) for row in kept] == [(text, str(answer)) for text, answer in pairs]


def test_a_test_question_with_another_answer_is_an_overlap(tmp_path: Path) -> None:
    test = write_jsonl(tmp_path / "test.jsonl", make_rows(("What is (2 + 3)?", 5)))
    _, kept, removed = clean(write_jsonl(tmp_path / "rows.jsonl", make_rows(("what is 2+3", 6))), tests=(test,))
    assert (kept, removed["rows.jsonl:1"].reason) == ([], "overlap")


def test_a_row_is_not_compared_with_removed_rows(tmp_path: Path) -> None:
    question = "What is the sum of 3 and 4?"
    rows = make_rows((question, "$$"), (question, 7), (question, "7"))
    _, kept, removed = clean(write_jsonl(tmp_path / "rows.jsonl", rows), lambda answers: ["$$"], answers="any")
    assert [row["answer"] for row in kept] == ["7"]
    assert {name: (each.reason, each.of) for name, each in removed.items()} == {
        "rows.jsonl:1": ("unverifiable", ""),
        "rows.jsonl:3": ("duplicate", "rows.jsonl:2"),
    }


def test_a_row_that_is_similar_only_to_a_removed_row_is_kept(tmp_path: Path) -> None:
    """Similarity is not transitive: a row of a chain is kept if it differs enough from all kept rows."""
    words = [f"w{chr(97 + number)}" for number in range(20)]
    chain = [" ".join(["new"] * number + words[number:]) for number in (0, 4, 8)]
    _, kept, removed = clean(write_jsonl(tmp_path / "rows.jsonl", make_rows(*((text, 1) for text in chain))))
    assert list(removed) == ["rows.jsonl:2"]
    assert len(kept) == 2


@pytest.mark.parametrize(
    ("answers", "kept"),
    [
        ("integer", ["7", "-3", "1234"]),
        ("number", ["7", "-3", "1234", "2.5", "3/4", "\\frac{1}{2}"]),
        ("any", ["7", "-3", "1234", "2.5", "3/4", "\\frac{1}{2}", "x+1"]),
    ],
)
def test_rows_whose_answer_has_the_wrong_kind_are_removed(tmp_path: Path, answers: str, kept: list[str]) -> None:
    given = ["7", "-3", "1,234", "2.5", "3/4", "\\frac{1}{2}", "x+1", "\\frac{", "see the figure below"]
    asked: list[str] = []

    def find_unreadable(texts: Collection[str]) -> list[str]:
        asked.extend(texts)
        return ["\\frac{"]

    rows = make_rows(*((f"What is number {number}?", answer) for number, answer in enumerate(given)))
    _, found, removed = clean(write_jsonl(tmp_path / "rows.jsonl", rows), find_unreadable, answers=answers)
    assert [row["answer"] for row in found] == kept
    assert asked == (["x+1", "\\frac{"] if answers == "any" else [])
    reasons = {each.detail: each.reason for each in removed.values()}
    assert reasons["see the figure below"] == "answer"
    assert reasons["\\frac{"] == ("unverifiable" if answers == "any" else "answer")


def test_unusable_rows_are_listed_up_to_the_limit(tmp_path: Path) -> None:
    rows = [*make_rows(("One?", 1)), "{broken\n", {"question": "No answer?"}, *make_rows(("Two?", 2))]
    source = write_jsonl(tmp_path / "rows.jsonl", rows)
    output, removed = tmp_path / "out.jsonl", tmp_path / "removed.jsonl"
    report = clean_questions(source, output, removed, CleanOptions(max_bad_rows=2), accept_all)
    assert (report.num_rows, report.num_kept, report.num_removed) == (4, 2, {"unusable": 2})
    details = [json.loads(line)["detail"] for line in removed.read_text().splitlines()]
    assert [detail.partition(": ")[2].partition(":")[0] for detail in details] == ["row 2", "row 3, field `answer`"]
    with pytest.raises(
        UnusableInput, match=r"row 3, field `answer`.*more unusable rows than --max-bad-rows = 1; the first: .*row 2"
    ):
        clean_questions(source, output, removed, CleanOptions(max_bad_rows=1), accept_all)
    assert len(output.read_text().splitlines()) == 2  # the output file still has the rows of the earlier cleaning


def test_one_bad_row_of_20_000_is_not_fatal(tmp_path: Path) -> None:
    rows: list[Any] = make_rows(
        *((f"What is the sum of {number} and {number + 1}?", 2 * number + 1) for number in range(20_000))
    )
    rows[14_000] = "\xff{\n"
    report, kept, removed = clean(write_jsonl(tmp_path / "rows.jsonl", rows))
    assert (report.num_rows, len(kept), list(report.num_removed)) == (20_000, 19_999, ["unusable"])
    assert "row 14001" in removed[""].detail


def test_different_questions_have_different_keys() -> None:
    """One column is an answer, and the others are the words, the numbers and the plain text of a question."""
    index = DuplicateIndex()
    digests = np.random.default_rng(0).integers(2**64, size=(4, 2**17), dtype=np.uint64)
    index.add(QuestionFeatures(digests, np.empty((2**17, 12), np.uint64)))
    assert index.find_repeats(np.zeros(2**17, np.bool_), num_tests=0) == ([], [])


def test_named_columns_are_kept_and_files_are_compressed(tmp_path: Path) -> None:
    rows = [{"prompt": WRAPPER.format("What is 1+1?"), "reward_model": {"ground_truth": "2"}, "level": 3, "other": 1}]
    source = write_jsonl(tmp_path / "rows.jsonl", rows)
    output = tmp_path / "out.jsonl.gz"
    options = CleanOptions(kept_columns=("level",))
    report = clean_questions(source, output, tmp_path / "removed.jsonl", options, accept_all)
    assert json.loads(gzip.decompress(output.read_bytes())) == {
        "question": "What is 1+1?",
        "answer": "2",
        "source": "rows.jsonl:1",
        "level": 3,
    }
    assert report.num_unwrapped == 1
    before = output.read_bytes()
    clean_questions(source, output, tmp_path / "removed.jsonl", options, accept_all)
    assert output.read_bytes() == before


def test_a_kept_column_that_no_row_has_is_refused(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "rows.jsonl", make_rows(("What is 1+1?", 2)))
    with pytest.raises(UnusableInput, match="--keep lvel: no row has this column"):
        clean(source, kept_columns=("lvel",))
    assert not source.with_name("out.jsonl").exists()

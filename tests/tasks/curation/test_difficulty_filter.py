"""`asterism data filter` keeps rows by a condition on their rollouts, and counts rows without rollouts separately."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import polars
import pytest

from asterism.analysis.evaluation.answer_records import AnswerRecord
from asterism.analysis.evaluation.exchange_formats import build_trace
from asterism.analysis.evaluation.trace_outcomes import OUTCOME_NAMES, read_outcomes
from asterism.configs.errors import UnusableInput
from asterism.configs.schema.algorithm import Sampling
from asterism.engine.data.data_files import DatasetError
from asterism.tasks.curation.difficulty_filter import FilterReport, Unvisited, filter_rows
from asterism.tasks.curation.row_conditions import parse_condition
from tests.engine.data.cold_start_rows import write_rows
from tests.tasks.curation.word_problems import WRAPPER

ROWS = [{"question": f"What is {number} + 1?", "answer": number + 1, "level": number % 3} for number in range(6)]
# Rewards of the rollouts of each row. None means an infrastructure failure.
REWARDS: list[list[float | None]] = [[1, 1, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0], [1, 1, None, None], [None] * 4, []]


def build_line(row: int, reward: float | None, name: str = "train.jsonl", **changes: Any) -> bytes:
    record = AnswerRecord(
        label="end_sampled",
        version=0,
        set="train",
        place=row,
        question=f"{name}:{row + 1}",
        sample=0,
        seed=row,
        gold=str(row + 1),
        ending="failed" if reward is None else "answered",
        correct=bool(reward),
        reward=reward or 0.0,
        response_tokens=100,
    )
    record = msgspec.structs.replace(record, **changes)
    trace = build_trace(record, f"What is {row} + 1?", "model", Sampling(), "0.1")
    return msgspec.json.encode(trace) + b"\n"


def write_traces(path: Path, rewards: Sequence[Sequence[float | None]] = REWARDS, **changes: Any) -> Path:
    path.write_bytes(b"".join(build_line(row, each, **changes) for row, many in enumerate(rewards) for each in many))
    return path


def keep(
    source: Path, traces: Path, text: str, output: Path | None = None, unvisited: Unvisited = "drop", task: str = ""
) -> FilterReport:
    outcomes = read_outcomes([traces], task or None)
    return filter_rows(source, outcomes, parse_condition(text, OUTCOME_NAMES), unvisited, output)


def read_answers(path: Path) -> list[int]:
    return [json.loads(line)["answer"] for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("condition", "answers"),
    [
        *(("solved < rollouts", [2, 3]), ("solved == rollouts", [1, 4]), ("0 < rate < 1", [2]), ("spread > 0", [2])),
        *(("reward <= 0.25 and best == 1", [2]), ("failed > 0", [4]), ("rollouts == 4", [1, 2, 3])),
        ("solved < 1 or failed == 2", [3, 4]),
        ("tokens == 100 and truncated == 0", [1, 2, 3, 4]),
    ],
)
def test_rows_are_kept_by_the_outcomes_of_their_rollouts(tmp_path: Path, condition: str, answers: list[int]) -> None:
    source, traces = write_rows(tmp_path / "train.jsonl", *ROWS), write_traces(tmp_path / "traces.jsonl")
    report = keep(source, traces, condition, tmp_path / "out.jsonl")
    assert read_answers(tmp_path / "out.jsonl") == answers
    assert (report.num_rows, report.num_kept, report.num_dropped) == (6, len(answers), 4 - len(answers))
    assert (report.num_unvisited, report.num_failed, report.num_written) == (2, 1, len(answers))
    assert report.rows_by_solved == {0: 1, 1: 1, 2: 1, 4: 1}


def test_rows_without_a_result_are_refused_until_the_user_decides(tmp_path: Path) -> None:
    source, traces = write_rows(tmp_path / "train.jsonl", *ROWS), write_traces(tmp_path / "traces.jsonl")
    with pytest.raises(UnusableInput, match=r"2 of 6 rows have no rollout .* --unvisited drop or --unvisited keep"):
        keep(source, traces, "solved < 4", tmp_path / "out.jsonl", "refuse")
    assert not (tmp_path / "out.jsonl").exists()
    keep(source, traces, "solved < 4", tmp_path / "out.jsonl", "keep")
    assert read_answers(tmp_path / "out.jsonl") == [2, 3, 4, 5, 6]
    whole = write_traces(tmp_path / "whole.jsonl", [[1.0], [0.0], [0.0], [0.0], [0.0], [0.0]])
    assert keep(source, whole, "solved < 1", None, "refuse").num_written == 5


def test_rows_of_another_file_are_found_by_question_and_answer(tmp_path: Path) -> None:
    """The evaluated file has another name and order, so that equal row names mean different questions."""
    traces = write_traces(tmp_path / "traces.jsonl")
    source = write_rows(tmp_path / "train.jsonl", *reversed(ROWS), {"question": "What is 1 + 1?", "answer": 3})
    report = keep(source, traces, "solved == 1", tmp_path / "out.jsonl")
    assert (read_answers(tmp_path / "out.jsonl"), report.num_unvisited) == ([2], 3)


def test_two_rows_with_the_same_question_have_separate_rollouts(tmp_path: Path) -> None:
    same = [{"question": "What is 0 + 1?", "answer": 1, "tests": each} for each in "ab"]
    lines = [build_line(0, 1.0), build_line(0, 0.0, question="train.jsonl:2")]
    (tmp_path / "traces.jsonl").write_bytes(b"".join(lines))
    source = write_rows(tmp_path / "train.jsonl", *same)
    keep(source, tmp_path / "traces.jsonl", "solved == 0", tmp_path / "out.jsonl")
    assert [json.loads(line)["tests"] for line in (tmp_path / "out.jsonl").read_text().splitlines()] == ["b"]


def test_success_follows_the_rule_of_the_run_and_not_the_sign_of_the_reward(tmp_path: Path) -> None:
    """A shaped reward of 0.3 is not a success in a run with evaluation.success = "correct"."""
    (tmp_path / "traces.jsonl").write_bytes(build_line(0, 0.3, correct=False) + build_line(1, 0.3, correct=True))
    source = write_rows(tmp_path / "train.jsonl", *ROWS[:2])
    keep(source, tmp_path / "traces.jsonl", "solved == 0", tmp_path / "out.jsonl")
    assert read_answers(tmp_path / "out.jsonl") == [1]


def test_only_traces_of_the_selected_task_are_counted(tmp_path: Path) -> None:
    """Two tasks can have files of the same name, and rows of environments have no question."""
    rows = [{"prompt": "", "board": each} for each in "ab"]
    lines = [
        build_line(0, 1.0, task="chess", gold=""),
        build_line(1, 0.0, task="chess", gold=""),
        build_line(0, 0.0, task="go", gold=""),
    ]
    (tmp_path / "traces.jsonl").write_bytes(
        b"".join(lines).replace(b"What is 0 + 1?", b"").replace(b"What is 1 + 1?", b"")
    )
    source = write_rows(tmp_path / "train.jsonl", *rows)
    report = keep(source, tmp_path / "traces.jsonl", "solved == 1", tmp_path / "out.jsonl", task="chess")
    assert (report.num_kept, report.num_dropped, report.num_unvisited) == (1, 1, 0)
    assert json.loads((tmp_path / "out.jsonl").read_text())["board"] == "a"
    with pytest.raises(UnusableInput, match="--task shogi: no trace of this task; the traces have chess, go"):
        read_outcomes([tmp_path / "traces.jsonl"], "shogi")


def test_parquet_rows_keep_their_columns_and_types(tmp_path: Path) -> None:
    frame = polars.DataFrame(ROWS).with_columns(polars.col("level").cast(polars.Int8), weight=polars.lit(0.1))
    frame = frame.with_columns(polars.col("weight").cast(polars.Float32))
    (tmp_path / "parts").mkdir()
    frame.head(2).write_parquet(tmp_path / "parts" / "0.parquet")
    frame.tail(4).write_parquet(tmp_path / "parts" / "1.parquet")
    traces = write_traces(tmp_path / "traces.jsonl")
    keep(tmp_path / "parts", traces, "solved < rollouts", tmp_path / "hard.parquet")
    found = polars.read_parquet(tmp_path / "hard.parquet")
    assert found.equals(frame[1:3])
    assert found.schema == frame.schema
    keep(tmp_path / "parts", traces, "solved < rollouts", tmp_path / "hard.jsonl")
    assert json.loads((tmp_path / "hard.jsonl").read_text().splitlines()[0])["weight"] == 0.1
    with pytest.raises(UnusableInput, match="only rows of parquet files become a parquet file"):
        keep(write_rows(tmp_path / "train.jsonl", *ROWS), traces, "solved < 1", tmp_path / "no.parquet")


def test_the_traces_of_a_question_are_found_despite_the_wrapper_of_a_published_set(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "raw.jsonl", {"prompt": WRAPPER.format("What is 0 + 1?"), "answer": 1})
    assert keep(source, write_traces(tmp_path / "traces.jsonl"), "solved == 4").num_kept == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no traces; the evaluation has no answers"),
        (b'{"task": {}}\n', "line 1"),
        (build_line(0, 1.0) + b"{\n", "line 2"),
        (build_line(0, 1.0, name="other.jsonl").replace(b"+", b"-"), "none of the 6 rows has a rollout"),
        (b"".join(build_line(row, 1.0) for row in range(6)), "no row of 6 meets the condition"),
    ],
)
def test_unusable_traces_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "traces.jsonl").write_bytes(content)
    with pytest.raises(UnusableInput, match=message):
        keep(write_rows(tmp_path / "train.jsonl", *ROWS), tmp_path / "traces.jsonl", "solved < 1")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnusableInput, match="no traces here; `asterism eval` writes"):
        read_outcomes([tmp_path])
    with pytest.raises(DatasetError, match="no such file"):
        keep(tmp_path / "no.jsonl", write_traces(tmp_path / "traces.jsonl"), "solved < 1")

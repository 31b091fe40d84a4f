"""Solved problems are read from the structured logs of a run, and data are written without these problems."""

import json
from pathlib import Path
from typing import Any

import pytest

from asterism.actors.stages.solved_problems import (
    ProblemResults,
    UnsolvedCount,
    read_problem_results,
    write_unsolved_rows,
)
from asterism.configs.errors import UnusableInput
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.success import SuccessRule
from asterism.engine.data.datasets import PLAIN_ROWS, RowLayout
from tests.engine.data.cold_start_rows import write_rows

STARTED, ENDED, RESUMED = (f"2026-11-26T10:0{minute}:00.5Z" for minute in range(3))


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    (tmp_path / "run" / "logs").mkdir(parents=True)
    return RunFolder(tmp_path / "run")


def write_logs(folder: RunFolder, groups: list[tuple[int, str, list[float | None]]], size: int = 2) -> None:
    """Write logs. Each group has an id, a problem, and the rewards of ended rollouts: None for a failed rollout."""
    starts = [_start(group_id, problem, size) for group_id, problem, _ in groups]
    ends = [
        _end(group_id, 10 * group_id + place, reward)
        for group_id, _, rewards in groups
        for place, reward in enumerate(rewards)
    ]
    write_rows(folder.logs / "head.jsonl", *starts)
    write_rows(folder.logs / "rollout-0.jsonl", *ends)


def append_line(log: Path, line: dict[str, Any] | str) -> None:
    with log.open("a") as file:
        file.write(line if isinstance(line, str) else f"{json.dumps(line)}\n")


def _start(group_id: int, problem: str, size: int, purpose: str = "train") -> dict[str, Any]:
    task, _, name = problem.rpartition("/")
    fields = {"purpose": purpose, "task": task, "problem": name, "size": size, "timestamp": STARTED}
    return {"event": "group.started", "group_id": group_id, **fields}


def _end(group_id: int, trajectory_id: int, reward: float | None) -> dict[str, Any]:
    fields = {"trajectory_id": trajectory_id, "reward": reward, "timestamp": ENDED}
    return {"event": "trajectory.ended", "group_id": group_id, **fields}


def read_solved_problems(folder: RunFolder, success: SuccessRule) -> dict[str, set[str]]:
    return {task: each.solved for task, each in read_problem_results(folder, success).items()}


def make_results(*solved: str, visited: tuple[str, ...] = ()) -> ProblemResults:
    return ProblemResults({*solved, *visited}, set(solved))


def test_a_problem_is_solved_if_all_rollouts_of_its_last_group_are_successes(folder: RunFolder) -> None:
    write_logs(
        folder,
        [
            (1, "train.jsonl:1", [1.0, 1.0]),
            (2, "train.jsonl:2", [1.0, 0.0]),
            (3, "train.jsonl:3", [1.0, None]),  # a failed rollout is not a success
            (4, "train.jsonl:4", [1.0]),  # the step ended before the second rollout
            (5, "train.jsonl:5", [0.0, 0.0]),
            (6, "train.jsonl:5", [1.0, 1.0]),  # the last group decides
            (7, "train.jsonl:1", [1.0, 1.0]),
            (8, "train.jsonl:6", [1.0, 1.0]),
            (9, "train.jsonl:6", [0.0, 1.0]),
        ],
    )
    results = read_problem_results(folder, SuccessRule())[""]
    assert results.solved == {"train.jsonl:1", "train.jsonl:5"}
    assert results.visited == {f"train.jsonl:{number}" for number in range(1, 7)}
    assert read_problem_results(folder, SuccessRule(limit=1.0))[""].solved == set()


def test_rollouts_from_before_a_resume_do_not_solve_a_group_with_the_same_id(folder: RunFolder) -> None:
    write_logs(folder, [(5, "train.jsonl:1", [1.0, 1.0])])
    append_line(folder.logs / "head.jsonl", _start(5, "train.jsonl:2", 2) | {"timestamp": RESUMED})
    assert read_solved_problems(folder, SuccessRule()) == {"": set()}


def test_rows_of_two_tasks_are_different_problems(folder: RunFolder) -> None:
    write_logs(folder, [(1, "math/train.jsonl:1", [1.0, 1.0]), (2, "sql/train.jsonl:1", [1.0, 0.0])])
    assert read_solved_problems(folder, SuccessRule()) == {"math": {"train.jsonl:1"}, "sql": set()}


def test_test_questions_and_an_incomplete_last_line_are_ignored(folder: RunFolder) -> None:
    write_logs(folder, [(1, "train.jsonl:1", [1.0, 1.0])])
    append_line(folder.logs / "head.jsonl", _start(2, "test.jsonl:1", 1, "evaluate"))
    append_line(folder.logs / "head.jsonl", '{"event": "group.started", "purp')
    append_line(folder.logs / "rollout-0.jsonl", _end(2, 30, 1.0))
    assert read_solved_problems(folder, SuccessRule()) == {"": {"train.jsonl:1"}}


def test_a_damaged_log_is_refused_with_its_line(folder: RunFolder) -> None:
    write_logs(folder, [(1, "train.jsonl:1", [1.0, 1.0])])
    append_line(folder.logs / "head.jsonl", '{"event": "group.started", "purp\n')
    with pytest.raises(UnusableInput, match=r"head\.jsonl: line 2"):
        read_solved_problems(folder, SuccessRule())


def test_a_missing_log_is_refused_by_name(folder: RunFolder) -> None:
    with pytest.raises(UnusableInput, match=r"head\.jsonl: No such file"):
        read_solved_problems(folder, SuccessRule())


def test_unsolved_rows_keep_all_fields_and_their_order(tmp_path: Path) -> None:
    source, target = tmp_path / "train.jsonl", tmp_path / "unsolved.jsonl"
    rows = [{"question": f"{number} + 1?", "answer": str(number + 1), "level": number} for number in range(1, 5)]
    append_line(write_rows(source, *rows), "{\n")
    results = make_results("train.jsonl:1", "train.jsonl:3", visited=("train.jsonl:2",))
    count = write_unsolved_rows(source, PLAIN_ROWS, results, target, max_bad_rows=1)
    assert (count, count.unsolved) == (UnsolvedCount(4, 2, unvisited=1), 2)
    assert [json.loads(line) for line in target.read_text().splitlines()] == [rows[1], rows[3]]


def test_a_repeated_row_does_not_return_a_solved_problem(tmp_path: Path) -> None:
    source, target = tmp_path / "train.jsonl", tmp_path / "unsolved.jsonl"
    rows = [{"question": text, "answer": "1"} for text in ("a", "b", "a", "b")]
    write_rows(source, *rows)
    assert write_unsolved_rows(source, PLAIN_ROWS, make_results("train.jsonl:1"), target) == UnsolvedCount(2, 1, 1)
    assert [json.loads(line) for line in target.read_text().splitlines()] == rows[1:2]
    used_as_they_are = RowLayout(needs_answer=False)
    assert write_unsolved_rows(source, used_as_they_are, make_results("train.jsonl:1"), target) == UnsolvedCount(
        4, 1, 3
    )


def test_no_file_is_left_if_all_problems_are_solved(tmp_path: Path) -> None:
    source, target = tmp_path / "train.jsonl", tmp_path / "unsolved.jsonl"
    write_rows(source, {"question": "1 + 1?", "answer": "2"})
    with pytest.raises(UnusableInput, match="all 1 problems are solved"):
        write_unsolved_rows(source, PLAIN_ROWS, make_results("train.jsonl:1"), target)
    assert not target.exists()

"""Tests of the problems that `asterism task check` finds in the scores of all rows."""

from asterism.configs.schema.success import SuccessRule, parse_success
from asterism.policies.groups.counts import classify_failure
from asterism.tasks.checking.play import Play
from asterism.tasks.checking.row_problems import find_row_score_problems, find_wrong_successes
from asterism.tasks.checking.row_scores import RowScores
from asterism.tasks.checking.turn_scripts import TurnScript


def scored(row: int, reward: float | None, *, truth: bool = True, failure: str = "", **components: float) -> Play:
    play = Play(f"rows.jsonl:{row}", TurnScript(("turn",), has_truth=truth))
    play.reward, play.components, play.failure = reward, components, failure
    play.failed_at = "reward" if failure else ""
    return play


def find(scores: RowScores, success: SuccessRule | None = None) -> list[tuple[str, str, str]]:
    findings = find_row_score_problems(scores, success or SuccessRule())
    return [(each.status, each.subject, each.detail) for each in findings]


def test_rows_without_problems_have_no_finding() -> None:
    plays = [scored(row, 1.0) for row in range(4)]
    assert find(RowScores(4, 4, (), plays, [scored(row, 0.0, truth=False) for row in range(4)])) == []


def test_failures_of_one_kind_are_one_finding_that_names_the_rows() -> None:
    right = [scored(row, None, failure=f"score raised KeyError: 'column {row}'") for row in (2, 5)] + [scored(3, 1.0)]
    wrong = [scored(2, None, truth=False, failure="score raised KeyError: 'column 2'")]
    other = [scored(4, None, failure="the ground truth cannot be parsed")]
    assert find(RowScores(5, 5, (), [*right, *other], wrong)) == [
        ("problem", "reward", "score raised KeyError: 'column 2' (2 of 5 rows: rows.jsonl:2, rows.jsonl:5)"),
        ("problem", "reward", "the ground truth cannot be parsed (1 of 5 rows: rows.jsonl:4)"),
    ]


def test_failures_that_differ_only_in_values_of_their_rows_are_of_one_kind() -> None:
    first, second = "f raised ValueError: 'eleven' in row 12\nmore", "f raised ValueError: 'twelve' in row 13"
    assert classify_failure(first) == classify_failure(second)
    assert classify_failure(first) != classify_failure("f raised KeyError: 'eleven' in row 12")


def test_rows_without_an_answer_are_a_problem_only_if_other_rows_have_one() -> None:
    plays = [scored(row, 1.0) for row in range(1, 4)]
    assert find(RowScores(3, 3, ("rows.jsonl:2",), plays, [])) == [
        ("problem", "rows", "1 of 3 rows have no answer: rows.jsonl:2")
    ]
    unanswered = tuple(play.row for play in plays)
    assert find(RowScores(3, 3, unanswered, [scored(row, 1.0, truth=False) for row in range(1, 4)], [])) == []


def test_a_ground_truth_without_success_gives_a_finding_of_status_hint() -> None:
    ((status, subject, detail),) = find(RowScores(2, 2, (), [scored(1, 1.0), scored(2, 0.0)], []))
    assert (status, subject) == ("hint", "rows")
    assert detail == "the ground truth as the answer is no success (reward > 0) in 1 of 2 rows: rows.jsonl:2"


def test_the_finding_of_a_rewarded_wrong_answer_lists_the_reward_components() -> None:
    wrong = [scored(1, 0.1, truth=False, correct=0.0, format=0.1), scored(2, 0.0, truth=False)]
    (finding,) = find_wrong_successes(wrong, SuccessRule())
    assert finding.status == "hint"
    assert finding.detail == (
        "a wrong answer is a success (reward > 0) in 1 of 2 rows, such as rows.jsonl:1: reward 0.1 (format 0.1)"
    )
    assert find_wrong_successes(wrong, parse_success("correct")) == []


def test_rows_beyond_the_limit_are_reported_as_not_scored() -> None:
    assert find(RowScores(9, 2, (), [scored(1, 1.0), scored(2, 1.0)], [])) == [
        ("hint", "rows", "only the first 2 of 9 rows are scored")
    ]

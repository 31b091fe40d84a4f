"""Finds problems in the scores of all rows (asterism.tasks.checking.row_scores)."""

from collections.abc import Iterator, Sequence

from asterism.configs.schema.success import SuccessRule
from asterism.policies.groups.counts import classify_failure
from asterism.tasks.checking.play import Play
from asterism.tasks.checking.row_scores import RowScores
from asterism.tasks.checking.task_problems import CheckFinding, shorten

_ROWS_SHOWN = 3


def find_row_score_problems(scores: RowScores, success: SuccessRule) -> list[CheckFinding]:
    return [
        *_find_failures(scores),
        *_find_missing_answers(scores),
        *_find_refused_truths(scores, success),
        *find_wrong_successes(scores.wrong, success),
        *_find_unscored(scores),
    ]


def _find_failures(scores: RowScores) -> Iterator[CheckFinding]:
    by_kind: dict[str, list[Play]] = {}
    for play in (*scores.right, *scores.wrong):
        if play.failure:
            by_kind.setdefault(classify_failure(play.failure), []).append(play)
    for plays in by_kind.values():
        rows = list(dict.fromkeys(play.row for play in plays))
        detail = f"{shorten(plays[0].failure)} ({len(rows):,} of {scores.num_scored:,} rows: {_list_rows(rows)})"
        remedy = "Correct the function or the rows. A run leaves such a trajectory out of the training."
        yield CheckFinding("problem", plays[0].failed_at or "reward", detail, remedy)


def _find_missing_answers(scores: RowScores) -> Iterator[CheckFinding]:
    """Find rows without an answer. They are normal if no row has an answer."""
    missing = scores.without_answer
    if missing and len(missing) < scores.num_scored:
        detail = f"{len(missing):,} of {scores.num_scored:,} rows have no answer: {_list_rows(missing)}"
        remedy = "Add the answer, or remove the row: a reward function gets an empty ground truth for it."
        yield CheckFinding("problem", "rows", detail, remedy)


def _find_refused_truths(scores: RowScores, success: SuccessRule) -> Iterator[CheckFinding]:
    scored = [play for play in scores.right if play.script.has_truth and play.reward is not None]
    refused = [play for play in scored if not success.is_met(play.reward or 0.0, play.components)]
    if refused and len(refused) < len(scored):  # if all answers are refused, they can need tool calls
        detail = (
            f"the ground truth as the answer is no success ({success.describe()}) in {len(refused):,} of "
            f"{scores.num_scored:,} rows: {_list_rows([play.row for play in refused])}"
        )
        yield CheckFinding("hint", "rows", detail, "Check the ground truth of these rows, or evaluation.success.")


def find_wrong_successes(plays: Sequence[Play], success: SuccessRule) -> list[CheckFinding]:
    """Find wrong answers that count as correct."""
    scored = [play for play in plays if play.reward is not None]
    met = [play for play in scored if success.is_met(play.reward or 0.0, play.components)]
    if not met:
        return []
    parts = ", ".join(f"{name} {value:g}" for name, value in met[0].components.items() if value > 0)
    detail = (
        f"a wrong answer is a success ({success.describe()}) in {len(met):,} of {len(scored):,} rows, such as "
        f"{met[0].row}: reward {met[0].reward:g}{f' ({parts})' if parts else ''}"
    )
    remedy = (
        "Set evaluation.success to the component that a correct answer needs, such as "
        'evaluation.success = "correct"; it decides on accuracy and on the positives of RoC.'
    )
    return [CheckFinding("hint", "success", detail, remedy)]


def _find_unscored(scores: RowScores) -> Iterator[CheckFinding]:
    if scores.num_scored < scores.num_rows:
        detail = f"only the first {scores.num_scored:,} of {scores.num_rows:,} rows are scored"
        yield CheckFinding("hint", "rows", detail, "Check a faster reward, or a file with the other rows.")


def _list_rows(names: Sequence[str]) -> str:
    more = f" and {len(names) - _ROWS_SHOWN:,} more" if len(names) > _ROWS_SHOWN else ""
    return f"{', '.join(names[:_ROWS_SHOWN])}{more}"

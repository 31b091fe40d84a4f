"""Keeps the rows of a data file by a condition on their rollouts: `asterism data filter`.

The report selects the problems of its last stage in this way: a checkpoint answers each problem k times, and the filter
drops the problems that all rollouts solve.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from asterism.analysis.evaluation.trace_outcomes import QuestionKey, QuestionOutcome, TraceOutcomes
from asterism.configs.atomic_write import raising_disk_errors, replacing_file
from asterism.configs.errors import UnusableInput
from asterism.engine.data.data_files import DatasetRow, list_data_files, read_rows
from asterism.engine.data.datasets import RowLayout, parse_problem, remove_wrapper
from asterism.tasks.curation.row_conditions import RowCondition

Unvisited = Literal["refuse", "keep", "drop"]

PARQUET = ".parquet"
_ANY_ROW = RowLayout(all_columns=True, needs_question=False, needs_answer=False)  # accepts rows of environments too


class FilterReport(msgspec.Struct):
    num_rows: int
    num_kept: int  # rows that the condition keeps
    num_dropped: int  # rows that the condition drops
    num_unvisited: int  # rows without a rollout that has a result
    num_failed: int  # unvisited rows on which every rollout failed by infrastructure
    num_written: int
    rows_by_solved: dict[int, int]  # number of visited rows by number of solved rollouts


class _Verdict(NamedTuple):
    row: DatasetRow
    outcome: QuestionOutcome | None  # None: a row without a trace
    meets: bool | None  # None: an unvisited row


def filter_rows(
    source: Path, outcomes: TraceOutcomes, condition: RowCondition, unvisited: Unvisited, output: Path | None
) -> FilterReport:
    """Write the kept rows unchanged, with all columns, in the order of the file.

    Raises DatasetError for an unusable file, and UnusableInput if no row has traces, if `unvisited` refuses rows
    without traces, or if no row remains.
    """
    writes_parquet = output is not None and output.suffix == PARQUET
    if writes_parquet and any(file.suffix.lower() != PARQUET for file in list_data_files(source)):
        raise UnusableInput(f"--out {output}: only rows of parquet files become a parquet file; write .jsonl")
    verdicts = [each._replace(row=each.row._replace(fields={})) for each in _judge_rows(source, outcomes, condition)]
    report = _count(verdicts, unvisited)
    _refuse_unusable(source, report, unvisited)
    if output is not None:
        kept = [_is_written(each, unvisited) for each in verdicts]
        (_write_parquet if output.suffix == PARQUET else _write_lines)(source, output, kept)
    return report


def _judge_rows(source: Path, outcomes: TraceOutcomes, condition: RowCondition) -> Iterator[_Verdict]:
    for row in read_rows(source):
        problem = parse_problem(row, _ANY_ROW)
        found = outcomes.find(problem.name, QuestionKey(remove_wrapper(problem.question), problem.ground_truth))
        if found is None:
            found = outcomes.find(problem.name, QuestionKey(problem.question, problem.ground_truth))
        is_visited = found is not None and found.rollouts > 0
        yield _Verdict(row, found, condition.is_met(found.compute_values()) if found and is_visited else None)


def _is_written(verdict: _Verdict, unvisited: Unvisited) -> bool:
    return unvisited == "keep" if verdict.meets is None else verdict.meets


def _count(verdicts: list[_Verdict], unvisited: Unvisited) -> FilterReport:
    visited = [each.outcome for each in verdicts if each.outcome is not None and each.meets is not None]
    return FilterReport(
        num_rows=len(verdicts),
        num_kept=sum(each.meets is True for each in verdicts),
        num_dropped=sum(each.meets is False for each in verdicts),
        num_unvisited=sum(each.meets is None for each in verdicts),
        num_failed=sum(each.meets is None and each.outcome is not None for each in verdicts),
        num_written=sum(_is_written(each, unvisited) for each in verdicts),
        rows_by_solved=dict(sorted(Counter(each.solved for each in visited).items())),
    )


def _refuse_unusable(source: Path, report: FilterReport, unvisited: Unvisited) -> None:
    if report.num_unvisited == report.num_rows:
        raise UnusableInput(
            f"{source}: none of the {report.num_rows:,} rows has a rollout with a result in the traces; evaluate this "
            "file: `asterism eval CHECKPOINT --set NAME=FILE -k K`"
        )
    if report.num_unvisited and unvisited == "refuse":
        raise UnusableInput(
            f"{source}: {report.num_unvisited:,} of {report.num_rows:,} rows have no rollout with a result in the traces, "
            "so that nothing shows how hard they are; add --unvisited drop or --unvisited keep"
        )
    if not report.num_written:
        raise UnusableInput(f"{source}: no row of {report.num_rows:,} meets the condition; nothing would be written")


# ---------------------------------------------------------------- output


def _write_lines(source: Path, output: Path, kept: list[bool]) -> None:
    encoder = msgspec.json.Encoder(enc_hook=str)
    with replacing_file(output) as file:
        for row, is_kept in zip(read_rows(source), kept, strict=True):
            if is_kept:
                file.write(encoder.encode(row.fields) + b"\n")


def _write_parquet(source: Path, output: Path, kept: list[bool]) -> None:
    """Write the kept rows with the columns and types of the source."""
    import polars  # a slow import

    frame: Any = polars.concat([polars.read_parquet(file, glob=False) for file in list_data_files(source)])
    new = output.with_name(f"{output.name}.new")
    try:
        with raising_disk_errors(output):
            frame.filter(polars.Series(kept, dtype=polars.Boolean)).write_parquet(new)
            new.replace(output)
    finally:
        new.unlink(missing_ok=True)

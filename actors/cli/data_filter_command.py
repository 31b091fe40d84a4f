"""`asterism data filter` keeps the rows that a checkpoint solves as often as a condition demands."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.markup import escape

from asterism.actors.cli.console import check_json_path, check_outputs, make_console, make_table, write_json
from asterism.actors.cli.log.subcommands import JsonOption
from asterism.configs.errors import UnusableInput

if TYPE_CHECKING:  # the imports take a second, and each command imports this file
    from rich.console import Console

    from asterism.tasks.curation.difficulty_filter import FilterReport

Unvisited = Literal["refuse", "keep", "drop"]
_EPILOG = "Example: asterism data filter train.jsonl --by runs/eval-demo-60 --keep 'solved < rollouts' --out hard.jsonl"


FileArgument = Annotated[
    Path, typer.Argument(help="File, or folder of parts, in a format of docs/data.md.", metavar="FILE")
]
ByOption = Annotated[
    list[Path], typer.Option(metavar="TRACES", help="traces.jsonl of `asterism eval`, or its folder; may be repeated.")
]
KeepOption = Annotated[
    str,
    typer.Option(
        metavar="CONDITION",
        help="Comparison of solved, rollouts, rate, failed, reward, best, worst, spread, tokens and truncated.",
    ),
]
OutOption = Annotated[
    Path | None,
    typer.Option(
        "--out",
        "--output",
        metavar="FILE",
        help="Kept rows: .jsonl, .jsonl.gz, or .parquet for parquet files (default: print the counts only).",
    ),
]
UnvisitedOption = Annotated[
    Unvisited, typer.Option(help="Rows without a rollout that has a result: refuse to filter, keep or drop them.")
]
TaskOption = Annotated[str | None, typer.Option(metavar="NAME", help=r"Count only traces of this task of [\[tasks]].")]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace an existing output file.")]


def filter_by_traces(
    file: FileArgument,
    by: ByOption,
    keep: KeepOption,
    output: OutOption = None,
    unvisited: UnvisitedOption = "refuse",
    task: TaskOption = None,
    overwrite: OverwriteOption = False,
    json_file: JsonOption = None,
) -> None:
    """Keep rows by a condition on their rollouts, such as 'solved < rollouts'; an evaluation has written their traces.

    A rollout counts as solved by `evaluation.success` of the run that wrote the traces.
    """
    from asterism.analysis.evaluation.trace_outcomes import OUTCOME_NAMES, read_outcomes
    from asterism.tasks.curation.difficulty_filter import filter_rows
    from asterism.tasks.curation.row_conditions import parse_condition

    check_json_path(json_file)
    condition = parse_condition(keep, OUTCOME_NAMES)
    if len({path.resolve() for path in by}) < len(by):
        raise UnusableInput("--by: names the same traces twice; they would count twice")
    if output is not None:
        check_outputs([output], [file, *by], (".jsonl", ".jsonl.gz", ".parquet"), overwrite=overwrite)
    outcomes = read_outcomes(by, task)
    report = filter_rows(file, outcomes, condition, unvisited, output)
    _print_report(report, unvisited, output, make_console())
    write_json(json_file, report)


def _print_report(report: FilterReport, unvisited: Unvisited, output: Path | None, console: Console) -> None:
    table = make_table(">Solved rollouts", ">Rows", pad_edge=True)
    for solved, count in report.rows_by_solved.items():
        table.add_row(str(solved), f"{count:,}")
    console.print(table)
    decided = {"refuse": "", "keep": ", kept by --unvisited", "drop": ", dropped by --unvisited"}[unvisited]
    failed = f" ({report.num_failed:,} with failed rollouts only)" if report.num_failed else ""
    console.print(
        f"{report.num_kept:,} rows meet the condition, {report.num_dropped:,} do not; "
        f"{report.num_unvisited:,} are unvisited{failed}{decided if report.num_unvisited else ''}",
        soft_wrap=True,
    )
    counts = f"{report.num_written:,} of {report.num_rows:,} rows"
    console.print(f"{escape(str(output))}: {counts}" if output else f"{counts}; --out FILE writes them", soft_wrap=True)


def add_filter_command(data_app: typer.Typer) -> None:
    data_app.command("filter", epilog=_EPILOG)(filter_by_traces)

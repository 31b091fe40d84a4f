"""The subcommands of `asterism data` fetch, inspect, clean, filter, split and render the data files of a run."""

from __future__ import annotations

from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from asterism.actors.cli.console import check_json_path, check_outputs, make_console, make_table, write_json
from asterism.actors.cli.data_filter_command import FileArgument, add_filter_command
from asterism.actors.cli.log.subcommands import JsonOption, SetOption
from asterism.configs.errors import UnusableInput

if TYPE_CHECKING:  # the imports take a second, and each command imports this file
    from collections.abc import Iterator

    from asterism.configs.schema.run_config import RunConfig
    from asterism.engine.hf.tokenizer import FastTokenizer
    from asterism.tasks.curation.cleaning import CleanReport
    from asterism.tasks.curation.inspection import FileInspection
    from asterism.tasks.curation.rendering import RenderedRow

data_app = typer.Typer(
    help="Prepare data files: fetch, inspect, clean, filter, split and render.", no_args_is_help=True
)

OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace existing output files.")]
Answers = Literal["integer", "number", "any"]
Source = Literal["train", "test", "sft"]

_MAX_SHOWN_IDS = 16
_REASONS = {
    "unusable": "not readable, or without question or answer",
    "answer": "the answer is not of the wanted kind",
    "unverifiable": "the verifier cannot parse the answer",
    "duplicate": "an earlier row has the same question and answer",
    "conflicting": "an earlier row has the same question with another answer",
    "near_duplicate": "an earlier row has nearly the same question, with the same numbers and answer",
    "overlap": "a test set has the question",
}


@data_app.command()
def fetch(
    name: Annotated[str, typer.Argument(help="Data set on the hub, such as openai/gsm8k.", metavar="NAME")],
    output: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder for its files.")],
    include: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Only files that match, such as '*.parquet'; may be repeated."),
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit (default: the newest).")] = None,
) -> None:
    """Download a data set from the Hugging Face hub. A second call continues an interrupted download."""
    console = make_console()
    for file in _download(name, output, include or [], revision):
        console.print(escape(str(file)), soft_wrap=True)


@data_app.command()
def inspect(file: FileArgument, json_file: JsonOption = None) -> None:
    """Report encoding, columns, unusable rows, repeated questions and unverifiable answers.

    Exit with 1 if a run would refuse the file without further keys, such as those of \\[\\[sft.mixture]].
    """
    from asterism.tasks.curation.answer_check import find_unreadable_answers
    from asterism.tasks.curation.inspection import inspect_data

    check_json_path(json_file)
    found = inspect_data(file, find_unreadable_answers)
    _print_inspection(found, make_console())
    write_json(json_file, found)
    raise typer.Exit(int(found.num_unusable > 0))


@data_app.command(epilog="Example: asterism data clean raw.parquet --output train.jsonl --against aime24.jsonl")
def clean(
    file: FileArgument,
    output: Annotated[Path, typer.Option(metavar="FILE", help="Kept rows: .jsonl or .jsonl.gz.")],
    answers: Annotated[
        Answers, typer.Option(help="Kind of answers to keep; `any` keeps all that the verifier can parse.")
    ] = "integer",
    against: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Test set that training must not contain; may be repeated."),
    ] = None,
    similarity: Annotated[
        float, typer.Option(min=0.3, max=1.0, help="Least share of equal word pairs of nearly equal questions.")
    ] = 0.6,
    keep: Annotated[list[str] | None, typer.Option(metavar="COLUMN", help="Column to copy; may be repeated.")] = None,
    max_bad_rows: Annotated[int, typer.Option(min=0, help="Unusable rows to skip before the command fails.")] = 100,
    overwrite: OverwriteOption = False,
    json_file: JsonOption = None,
) -> None:
    """Keep verifiable, distinct questions that no test set has, in the layout {"question", "answer", "source"}.

    A file with OUTPUT's name and `.removed.jsonl` lists each removed row with the reason.
    """
    from asterism.tasks.curation.answer_check import find_unreadable_answers
    from asterism.tasks.curation.cleaning import OUTPUT_COLUMNS, CleanOptions, clean_questions

    check_json_path(json_file)
    if taken := [name for name in keep or () if name in OUTPUT_COLUMNS]:
        raise UnusableInput(f"--keep {taken[0]}: the output has a column of this name")
    removed = output.with_name(output.name.removesuffix(".gz").removesuffix(".jsonl") + ".removed.jsonl")
    check_outputs([output, removed], [file, *(against or [])], overwrite=overwrite)
    options = CleanOptions(answers, similarity, tuple(against or ()), max_bad_rows, tuple(keep or ()))
    report = clean_questions(file, output, removed, options, find_unreadable_answers)
    _print_clean_report(report, output, removed, make_console())
    write_json(json_file, report)


add_filter_command(data_app)


@data_app.command()
def split(
    file: FileArgument,
    test: Annotated[int, typer.Option(min=1, metavar="N", help="Number of distinct test questions.")],
    output: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder for train.jsonl and test.jsonl.")],
    seed: Annotated[int, typer.Option(help="Random seed of the choice of test questions.")] = 0,
    overwrite: OverwriteOption = False,
    json_file: JsonOption = None,
) -> None:
    """Choose test questions at random. Copies of a question go to the same file."""
    from asterism.tasks.curation.splitting import split_questions

    check_json_path(json_file)
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UnusableInput(f"--output {output}: cannot be a folder: {error.strerror}") from None
    train_file, test_file = output / "train.jsonl", output / "test.jsonl"
    check_outputs([train_file, test_file], [file], overwrite=overwrite)
    report = split_questions(file, train_file, test_file, test, seed)
    console = make_console()
    for path, count in ((train_file, report.num_train), (test_file, report.num_test)):
        console.print(f"{escape(str(path))}: {count:,} rows", soft_wrap=True)
    write_json(json_file, report)


@data_app.command()
def render(
    config: Annotated[Path, typer.Argument(help="Configuration file in TOML.", metavar="CONFIG")],
    source: Annotated[
        Source, typer.Option(help="Training questions, test questions, or cold-start dialogues.")
    ] = "train",
    rows: Annotated[int, typer.Option(min=1, help="Number of rows, from each file of the cold start.")] = 3,
    task: Annotated[str, typer.Option(metavar="NAME", help=r"Task of [\[tasks]] (default: the first).")] = "",
    override: SetOption = None,
) -> None:
    """Show rows exactly as the model sees them: text, special tokens, token ids, and what the loss covers."""
    from asterism.configs.load import load_run

    run = load_run(config, override or [])
    console = make_console()
    for row in _render_rows(run, source, task, rows):
        console.print(Text(f"{row.name} {row.note}".rstrip(), "bold"), soft_wrap=True)
        for part in row.parts:
            label = "trained" if part.is_trained else "context"
            ids = " ".join(map(str, part.token_ids[:_MAX_SHOWN_IDS]))
            more = " ..." if len(part.token_ids) > _MAX_SHOWN_IDS else ""
            console.print(Text(f"-- {label}, {len(part.token_ids)} tokens: {ids}{more}", "dim"), soft_wrap=True)
            console.print(Text(part.text, "green" if part.is_trained else ""), soft_wrap=True)


# ---------------------------------------------------------------- inputs


def _download(name: str, folder: Path, patterns: list[str], revision: str | None) -> list[Path]:
    """Download the files and return their paths. Raises UnusableInput."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.errors import HTTPError as HttpError  # pyright: ignore[reportPrivateImportUsage]

    try:
        fetch_files = partial(
            snapshot_download,
            name,
            repo_type="dataset",
            local_dir=folder,
            allow_patterns=patterns or None,
            revision=revision,
        )
        # Without the hub, a dry run fails; a download accepts an existing folder, whatever files it contains.
        files = [folder / each.filename for each in fetch_files(dry_run=True)]
        fetch_files()
    except HFValidationError as error:
        raise UnusableInput(f"{name}: {error}") from None
    except (HttpError, OSError) as error:
        cause = error.__cause__ or error
        raise UnusableInput(f"{name}: {type(cause).__name__}: {str(cause).strip()}".splitlines()[0]) from error
    if not files:
        raise UnusableInput(f"{name}: no file matches {', '.join(patterns)}")
    return files


def _render_rows(run: RunConfig, source: Source, name: str, count: int) -> Iterator[RenderedRow]:
    from asterism.actors.launch.checks.task_code_checks import describe_tasks
    from asterism.configs.run_folder import RunFolder
    from asterism.engine.hf.tokenizer import load_tokenizer
    from asterism.tasks.curation.rendering import render_dialogues, render_questions

    folder = RunFolder(Path(run.runs_folder) / run.name)
    tokenizer: FastTokenizer = load_tokenizer(folder.expand_path(run.model.checkpoint))
    descriptions = describe_tasks(run)
    if source == "sft":
        files = [(file, folder.expand_path(file.data)) for file in run.sft.files.values()]
        return chain.from_iterable(
            islice(render_dialogues(run, descriptions, *each, tokenizer), count) for each in files
        )
    tasks = {task.name: task for task in run.resolved_tasks}
    if name and name not in tasks:
        raise UnusableInput(f"--task {name}: there is no such task; the configuration has {', '.join(tasks)}")
    task = tasks[name] if name else run.resolved_tasks[0]
    path = folder.expand_path(task.data if source == "train" else task.test)
    max_bad_rows = run.data.max_bad_rows if source == "train" else 0
    return islice(render_questions(task, descriptions[task.name], path, tokenizer, max_bad_rows), count)


# ---------------------------------------------------------------- output


def _print_clean_report(report: CleanReport, output: Path, removed: Path, console: Console) -> None:
    table = make_table("Removed", ">Rows", "Reason", pad_edge=True)
    for reason, count in report.num_removed.items():
        table.add_row(reason, f"{count:,}", _REASONS[reason])
    if report.num_removed:
        console.print(table)
    unwrapped = f"; removed the instruction for another answer format from {report.num_unwrapped:,}"
    suffix = unwrapped if report.num_unwrapped else ""
    console.print(f"{escape(str(output))}: {report.num_kept:,} of {report.num_rows:,} rows{suffix}", soft_wrap=True)
    console.print(f"{escape(str(removed))}: the others", soft_wrap=True)


def _print_inspection(found: FileInspection, console: Console) -> None:
    for name, encoding in found.encodings.items():
        console.print(f"{escape(name)}: {encoding or 'parquet'}", soft_wrap=True)
    table = make_table("Column", "Values", ">Missing", pad_edge=True)
    for name, column in found.columns.items():
        types = ", ".join(f"{count:,} {kind}" for kind, count in column.types.items())
        table.add_row(escape(name), types, f"{column.num_missing:,}")
    console.print(table)
    lines = [f"{found.num_rows:,} rows, {found.num_unusable:,} unusable"]
    if found.num_dialogues:
        lines.append(f"{found.num_dialogues:,} dialogues for the cold start")
    if found.answer_kinds:
        median, high, longest = found.question_characters
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in found.answer_kinds.items())
        lines += [found.counts, f"answers: {kinds}"]
        lines.append(f"characters of a question: {median:,} median, {high:,} at 95 %, {longest:,} maximum")
    lines += [f"warning: {warning}" for warning in found.warnings]
    lines += [f"unusable: {problem}" for problem in found.unusable]
    lines += [f"the verifier cannot parse the answer {answer!r}" for answer in found.unreadable_answers]
    if found.num_unchecked_answers:
        lines.append(f"{found.num_unchecked_answers:,} further distinct answers are not checked")
    for line in lines:
        console.print(escape(line), soft_wrap=True)

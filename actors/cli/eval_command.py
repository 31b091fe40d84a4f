"""`asterism eval` answers questions with a checkpoint or with servers, and writes and prints the results."""

import asyncio
from pathlib import Path

import uvloop
from rich.console import Console
from rich.markup import escape

from asterism.actors.cli.join_command import EXIT_INTERRUPTED
from asterism.actors.evaluation.evaluation_run import (
    EvalOptions,
    EvaluationSetup,
    build_evaluation_setup,
    count_planned_answers,
)
from asterism.actors.evaluation.provenance import Provenance, compute_provenance, keep_provenance
from asterism.actors.evaluation.result_files import write_results
from asterism.actors.launch.checks.input_checks import check_inputs
from asterism.actors.launch.claim_run_folder import claimed_run_folder, increment_counter, keep_task_descriptions
from asterism.actors.launch.display import Display, make_display
from asterism.actors.launch.launcher import Launcher, LogWriteFailure, ProcessDied, RunEnding, TrainingStopped
from asterism.analysis.evaluation.answer_records import read_answers
from asterism.analysis.evaluation.results_table import build_results_table
from asterism.bus.addresses import LAUNCHER
from asterism.bus.messages import Progress
from asterism.bus.process.structured_log import configure_logging
from asterism.configs.atomic_write import DiskError, raising_disk_errors
from asterism.configs.errors import UnusableInput
from asterism.configs.load import load_run
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.run_config import RunConfig
from asterism.engine.engine_code import find_evaluated_models
from asterism.policies.tools.task_description import TaskDescription, choose_accuracy_label

_PROGRESS_INTERVAL_S = 2.0


def run_evaluation(options: EvalOptions, *, resume: bool, overwrite: bool, console: Console) -> int:
    """Return 0; 1 after a lost process, a full disk or only failures; 130 if interrupted. Raises UnusableInput."""
    try:
        return _run_evaluation(build_evaluation_setup(options), resume=resume, overwrite=overwrite, console=console)
    except KeyboardInterrupt:
        console.print("interrupted", markup=False)
        return EXIT_INTERRUPTED


def _run_evaluation(setup: EvaluationSetup, *, resume: bool, overwrite: bool, console: Console) -> int:
    run, descriptions = setup.run, dict[str, TaskDescription]()
    folder = RunFolder(Path(run.runs_folder) / run.name)
    _check_folder(run, folder, resume=resume, overwrite=overwrite)
    inputs = check_inputs(run, descriptions)
    served = find_evaluated_models(run)
    run = served.run
    setup = setup._replace(run=run)
    provenance = compute_provenance(run, setup.weights, served.description)
    resume = resume and folder.config.exists()  # no configuration: the evaluation was killed before it began
    with claimed_run_folder(run, resume=resume, overwrite=overwrite) as folder:
        keep_provenance(folder, provenance)
        keep_task_descriptions(folder, descriptions)
        refusal = LogWriteFailure()
        configure_logging(folder, LAUNCHER, run.log.level, refusal.record)
        display = make_display(console, choose_accuracy_label(run, descriptions))
        for line in (f"evaluation {run.name}, seed {run.seed}, in {folder.path}", *inputs):
            display.print_line(line)
        try:
            with raising_disk_errors(folder.path):
                return _report(_answer_questions(setup, folder, refusal, display), run, folder, provenance, console)
        except (ProcessDied, TrainingStopped, DiskError) as error:
            console.print(f"[bold red]failed:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
            console.print("(--resume continues with the missing answers)", markup=False)
            return 1


def _check_folder(run: RunConfig, folder: RunFolder, *, resume: bool, overwrite: bool) -> None:
    """Check that this evaluation may use the folder. Raises UnusableInput before anything is deleted."""
    if resume and not folder.path.exists():
        raise UnusableInput(
            f"{folder.path}: no evaluation to --resume; leave --resume out, or name the step of the evaluation, as in "
            "RUN:40 (RUN alone is the newest checkpoint)"
        )
    if run.model.checkpoint and Path(run.model.checkpoint).resolve().is_relative_to(folder.path.resolve()):
        raise UnusableInput(f"{folder.path}: contains the checkpoint to evaluate; choose another folder with --name")
    if overwrite and folder.config.exists() and not load_run(folder.config).evaluation.only:
        raise UnusableInput(
            f"{folder.path}: is no evaluation, so --overwrite does not delete it; choose another folder with --name"
        )


def _report(ending: RunEnding, run: RunConfig, folder: RunFolder, provenance: Provenance, console: Console) -> int:
    if ending == "interrupted":
        console.print("interrupted; the same command with --resume continues with the missing answers", markup=False)
        return EXIT_INTERRUPTED
    console.print(build_results_table(write_results(run, folder, provenance)))
    console.print(f"results: {folder.results}", markup=False, soft_wrap=True)
    return 0


def _answer_questions(
    setup: EvaluationSetup, folder: RunFolder, refusal: LogWriteFailure, display: Display
) -> RunEnding:
    """Launch the processes, unless a resumed evaluation is complete."""
    if folder.results.exists() and not any(each.is_failed for each in read_answers(folder.answers)):
        display.print_line("all questions are answered")
        display.close()
        return "finished"
    launcher = Launcher(setup.run, folder, display, increment_counter(folder.launch_counter), refusal)
    try:
        return uvloop.run(_launch(launcher, setup, folder, display))
    finally:
        display.close()


async def _launch(launcher: Launcher, setup: EvaluationSetup, folder: RunFolder, display: Display) -> RunEnding:
    showing = asyncio.create_task(_show_answers(folder, count_planned_answers(setup.run), display))
    try:
        return await launcher.launch()
    finally:
        showing.cancel()


async def _show_answers(folder: RunFolder, planned: int, display: Display) -> None:
    """Show the progress until cancelled. Only new lines are read: the file has the dialogues of all answers."""
    count = position = 0
    while True:
        await asyncio.sleep(_PROGRESS_INTERVAL_S)
        added = await asyncio.to_thread(_read_from, folder.answers, position)
        position += len(added)
        if new := added.count(b"\n"):
            count += new
            display.show_progress(Progress("answers", min(count, planned), planned, {}))


def _read_from(path: Path, position: int) -> bytes:
    if not path.exists():
        return b""
    with path.open("rb") as file:
        file.seek(position)
        return file.read()

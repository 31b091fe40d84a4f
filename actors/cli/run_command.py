"""`asterism run` runs a configuration and prints the summary of the finished run."""

import os
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import uvloop
from rich.console import Console
from rich.markup import escape

from asterism.actors.cli.join_command import EXIT_INTERRUPTED, join_run
from asterism.actors.launch.checks.data_digests import keep_data_digests
from asterism.actors.launch.checks.input_checks import check_inputs
from asterism.actors.launch.claim_run_folder import (
    RunAlreadyFinished,
    claimed_run_folder,
    increment_counter,
    keep_task_descriptions,
)
from asterism.actors.launch.display import Display, make_display
from asterism.actors.launch.job_environment import configure_head, configure_worker, read_placement
from asterism.actors.launch.launcher import Launcher, LogWriteFailure, ProcessDied, RunEnding, TrainingStopped
from asterism.actors.launch.run_manifest import write_first_manifest
from asterism.actors.replay.verification import RunVerifier
from asterism.actors.runtime.resume_point import find_resume_step
from asterism.actors.stages.stage_sequence import Stages, StageSelection, StageSequence, count_stages_to_run
from asterism.analysis.run_figures import list_curve_lines, list_stage_curve_lines
from asterism.analysis.summary import summarize
from asterism.analysis.summary_table import build_summary_table, list_health_lines
from asterism.bus.addresses import LAUNCHER
from asterism.bus.process.structured_log import configure_logging
from asterism.configs.atomic_write import DiskError, raising_disk_errors, write_atomically
from asterism.configs.errors import UnusableInput
from asterism.configs.load import list_preset_changes, load_run, load_stages
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.run_config import RunConfig
from asterism.policies.tools.task_description import TaskDescription, choose_accuracy_label


def run_recipe(config: Path, overrides: Sequence[str], selection: StageSelection, console: Console) -> int:
    """Return 0; 1 if a process died, the disk is full or a health check failed; 130 if interrupted."""
    try:
        if stages := load_stages(config, overrides):
            return _run_stages(stages, selection, console)
        if selection.first:
            raise UnusableInput(f"--from-stage {selection.first}: {config} has no [[stages]]")
        run, place = load_run(config, overrides), read_placement(os.environ)
        if run.evaluation.only:
            raise UnusableInput(f"{config}: evaluation.only is for `asterism eval`; a run that trains must not set it")
        if place is not None and place.rank > 0:
            return join_run(configure_worker(run, place), console)
        for line in list_preset_changes(config, overrides, run):
            console.print(f"other value than the preset's: {line}", markup=False, highlight=False, soft_wrap=True)
        run = configure_head(run, place)
        return _run_configured(run, resume=selection.resume, overwrite=selection.overwrite, console=console)
    except RunAlreadyFinished as finished:
        console.print(str(finished), markup=False, highlight=False, soft_wrap=True)
        return 0
    except KeyboardInterrupt:  # ^C came before or after the launcher, for example during the replay
        console.print("interrupted", markup=False)
        return EXIT_INTERRUPTED


def _run_stages(stages: Stages, selection: StageSelection, console: Console) -> int:
    """Run the stages on the head; a worker node joins each stage that the head runs."""
    place = read_placement(os.environ)
    if place is not None and place.rank > 0:
        joining = configure_worker(stages[0][1], place)
        count = count_stages_to_run(stages, selection)
        return next((code for _ in range(count) if (code := join_run(joining, console))), 0)

    def print_line(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    def run_stage(run: RunConfig, resume: bool) -> int:
        return _run_configured(configure_head(run, place), resume=resume, overwrite=False, console=console)

    sequence = StageSequence(stages, selection, print_line)
    code = sequence.run(run_stage)
    if code == 0 and any(run.log.curves for _, run in stages):
        for line in list_stage_curve_lines(sequence.folder):
            print_line(line)
    return code


def _run_configured(run: RunConfig, *, resume: bool, overwrite: bool, console: Console) -> int:
    descriptions: dict[str, TaskDescription] = {}
    inputs = [] if resume else check_inputs(run, descriptions)
    with claimed_run_folder(run, resume=resume, overwrite=overwrite) as folder:
        keep_data_digests(folder, run)
        if resume:  # a finished run does not need its inputs
            inputs = check_inputs(run, descriptions)
        keep_task_descriptions(folder, descriptions)
        write_first_manifest(folder)
        refusal = LogWriteFailure()
        configure_logging(folder, LAUNCHER, run.log.level, refusal.record)
        display = make_display(console, choose_accuracy_label(run, descriptions))
        began = time.monotonic()
        for line in (f"run {run.name}, seed {run.seed}, in {folder.path}", *inputs):
            display.print_line(line)
        try:
            with raising_disk_errors(folder.path):
                verifier = RunVerifier(run, folder)
                try:
                    ending = uvloop.run(
                        Launcher(run, folder, display, increment_counter(folder.launch_counter), refusal).launch()
                    )
                finally:
                    display.close()
                    verifier.close()
                return _finish_run(ending, run, folder, verifier, display, console, time.monotonic() - began)
        except ProcessDied as error:
            cause = str(error)
        except TrainingStopped as error:
            cause = (
                f"{error}\n(after the repair, --resume continues from the last checkpoint; keys of [health] may change)"
            )
        except DiskError as error:
            cause = f"{error}\n(free some space, then resume from the last checkpoint with --resume)"
        console.print(f"[bold red]failed:[/] {escape(cause)}", highlight=False, soft_wrap=True)
        return 1


def describe_resumption(folder: RunFolder) -> str:
    step = find_resume_step(folder)
    if step is not None:
        return f"continues after step {step}, from {folder.get_checkpoint_path(step)}"
    if folder.partial_cold_start.exists():
        return f"continues the cold start from {folder.partial_cold_start}"
    return "starts again, since there is no checkpoint yet"


def _finish_run(
    ending: RunEnding,
    run: RunConfig,
    folder: RunFolder,
    verifier: RunVerifier,
    display: Display,
    console: Console,
    wall_s: float,
) -> int:
    if ending == "interrupted":
        display.print_line(f"interrupted; `asterism run ... --resume` {describe_resumption(folder)}")
        return EXIT_INTERRUPTED
    identical, unusable = None, None
    if run.log.events and run.log.verify:
        try:
            identical = verifier.finish(display.print_line).identical
        except UnusableInput as error:
            unusable = error
    summary = summarize(run, folder, wall_s=wall_s, replay_identical=identical)
    write_atomically(folder.summary, msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
    console.print(build_summary_table(summary))
    for line in list_health_lines(summary):
        display.print_line(line)
    if summary["prompts_skipped"]:
        display.print_line(
            f"{summary['prompts_skipped']} prompts longer than dialogue.prompt_tokens were skipped (see logs/head.jsonl)"
        )
    for line in list_curve_lines(folder) if run.log.curves else ():
        display.print_line(line)
    display.print_line(f"summary: {folder.summary}")
    if unusable is not None:
        raise UnusableInput(f"the run is finished, but its logs cannot be replayed: {unusable}")
    return 0

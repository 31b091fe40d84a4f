"""`asterism run`: from a configuration to a finished run's table and curves."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import uvloop
from rich.console import Console
from rich.markup import escape

from actors.cluster_place import of_another, of_node_0
from actors.display import Display, display_for
from actors.join_command import join_run
from actors.launcher import Ending, Launcher, ProcessDied
from actors.refusal import Refusal
from actors.replay import replay_run
from actors.run_setup import claimed, next_boot
from analysis.summary import summarize
from analysis.summary_table import summary_table
from bus.structured_log import configure
from configs.disk import DiskRefused, write_whole, writing
from configs.load import load_run
from configs.placement import place_of
from configs.run_folder import RunFolder
from configs.schema import Run

INTERRUPTED = 130  # exit code, as a shell's after ^C


def run_recipe(config: Path, overrides: Sequence[str], *, resume: bool, overwrite: bool, console: Console) -> int:
    """The exit code: 0 finished, 1 a process died or the disk is full, 130 interrupted. Raises UnusableInput."""
    run, place = load_run(config, overrides), place_of(os.environ)
    if place is not None and place.rank > 0:
        return join_run(of_another(run, place), console)
    run = of_node_0(run, place)
    with claimed(run, resume=resume, overwrite=overwrite) as folder:
        refusal = Refusal()
        configure(folder, "launcher", run.log.level, refusal.note)
        display = display_for(console)
        began = time.monotonic()
        display.say(f"run {run.name}, seed {run.seed}, in {folder.path}")
        try:
            with writing(folder.path):
                try:
                    ending = uvloop.run(Launcher(run, folder, display, next_boot(folder), refusal).launch())
                finally:
                    display.close()
                return _close(ending, run, folder, display, console, time.monotonic() - began)
        except ProcessDied as error:
            cause = str(error)
        except DiskRefused as error:
            cause = f"{error}\n(--resume goes on from the last checkpoint when there is room)"
        console.print(f"[bold red]failed:[/] {escape(cause)}", highlight=False, soft_wrap=True)
        return 1


def _close(ending: Ending, run: Run, folder: RunFolder, display: Display, console: Console, wall_s: float) -> int:
    if ending == "interrupted":
        display.say(
            f"interrupted; `asterism run ... --resume` goes on from the last checkpoint in {folder.checkpoints}"
        )
        return INTERRUPTED
    identical = None
    if run.log.events:
        display.say("replaying the event logs")
        identical = replay_run(run, folder).identical
    summary = summarize(run, folder, wall_s=wall_s, replay_identical=identical)
    write_whole(folder.summary, msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
    console.print(summary_table(summary))
    if summary["prompts_skipped"]:
        display.say(f"{summary['prompts_skipped']} prompts over dialogue.prompt_tokens were skipped (logs/head.jsonl)")
    if summary["steps"]:
        from analysis.curves import draw_curves  # matplotlib: a run does not wait for it to begin

        display.say(f"curves: {draw_curves(folder.path)}")
    display.say(f"summary: {folder.summary}")
    return 0

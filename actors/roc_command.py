"""`asterism log roc`: what a run's steps would have been trained on under other settings of Resample-on-Correct."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from actors import json_file
from actors.logged_groups import steps_of
from actors.section_overrides import settings_of
from configs.errors import UnusableInput
from configs.load import differences, load_resolved
from configs.run_folder import RunFolder
from configs.schema import Run
from policies.refiltering import Considered, Difference, Kept, considered, difference


class Step(msgspec.Struct, frozen=True):
    step: int
    difference: Difference
    trajectories: tuple[Considered, ...]  # of all groups that were judged for it


class Refiltered(msgspec.Struct, frozen=True):
    run: str
    settings: tuple[str, ...]  # `key: the run's -> the other`
    steps: tuple[Step, ...]
    all_steps: Difference


def filter_again(path: RunFolder, step: str, overrides: Sequence[str], file: Path | None, console: Console) -> None:
    """Raises UnusableInput."""
    json_file.check_place(file)
    refiltered = refilter(path, settings_of(path, overrides, ("roc",)), _number_of(step))
    _show(refiltered, console)
    json_file.write(file, refiltered)


def refilter(folder: RunFolder, other: Run, only: int | None) -> Refiltered:
    """Of a step that was done twice, as after a resume, the later one counts."""
    run = load_resolved(folder.config)
    steps: dict[int, Step] = {}
    for logged in steps_of(run, folder):
        steps = {step: each for step, each in steps.items() if step < logged.step}
        trajectories = [each for group in logged.groups for each in considered(group, other)]
        steps[logged.step] = Step(logged.step, difference(trajectories), tuple(trajectories))
    if not steps:
        raise UnusableInput(f"{folder.events}: of no step all events are there, up to its batch")
    if only is not None and only not in steps:
        raise UnusableInput(f"--step {only}: {folder.path} has steps {min(steps)} to {max(steps)}")
    chosen = tuple(steps.values()) if only is None else (steps[only],)
    everything = difference([each for step in chosen for each in step.trajectories])
    return Refiltered(str(folder.path), tuple(differences(run, other)), chosen, everything)


def _number_of(step: str) -> int | None:
    if step == "all":
        return None
    try:
        return int(step)
    except ValueError:
        raise UnusableInput(f"--step {step}: expected a step's number, or all") from None


# ---------------------------------------------------------------- what is printed


def _show(refiltered: Refiltered, console: Console) -> None:
    settings = "; ".join(refiltered.settings) or "its own settings"
    console.print(f"{refiltered.run}, filtered again by {settings}", markup=False, highlight=False, soft_wrap=True)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for title in ("step", "groups", "kept", "by both", "|Δ advantage|", "failed calls in positives", "tokens"):
        table.add_column(title, justify="right")
    for step in refiltered.steps:
        table.add_row(str(step.step), *_cells(step.difference))
    if len(refiltered.steps) > 1:
        table.add_section()
        table.add_row("all", *_cells(refiltered.all_steps), style="bold")
    console.print(table)
    if len(refiltered.steps) == 1:
        _show_groups(refiltered.steps[0], console)


def _cells(each: Difference) -> list[str]:
    return [
        _pair(each, lambda kept: kept.groups, "d"),
        _pair(each, lambda kept: kept.trajectories, "d"),
        str(each.both),
        "-" if each.advantage_change_mean is None else f"{each.advantage_change_mean:.3f}",
        _pair(each, lambda kept: kept.failed_call_share, ".1%"),
        _pair(each, lambda kept: kept.response_tokens_mean, ".0f"),
    ]


def _pair(each: Difference, value_of: Callable[[Kept], float | None], form: str) -> str:
    """The run's, and what it would have been, where it is another."""
    before, after = (
        "-" if (value := value_of(kept)) is None else format(value, form) for kept in (each.run, each.other)
    )
    return before if before == after else f"{before} -> {after}"


def _show_groups(step: Step, console: Console) -> None:
    """Those of which others would have been kept."""
    for group_id in sorted({each.group_id for each in step.trajectories}):
        members = [each for each in step.trajectories if each.group_id == group_id]
        gone = [each.trajectory_id for each in members if each.advantage is not None and each.other_advantage is None]
        come = [each.trajectory_id for each in members if each.advantage is None and each.other_advantage is not None]
        if gone or come:
            told = [f"without {', '.join(map(str, gone))}"] if gone else []
            told += [f"with {', '.join(map(str, come))}"] if come else []
            console.print(f"group {group_id}: {', '.join(told)}", highlight=False, soft_wrap=True)

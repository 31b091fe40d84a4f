"""`asterism log roc` shows the trajectories that other Resample-on-Correct settings would have selected."""

from collections.abc import Callable
from typing import NamedTuple, Self

import msgspec
from rich.console import Console
from rich.markup import escape

from asterism.actors.cli.console import make_table, print_line
from asterism.actors.cli.log.what_if import Conditions, print_heading
from asterism.analysis.roc_refilter import (
    CandidateTrajectory,
    SelectionDifference,
    SelectionStats,
    compute_difference,
    list_candidates,
    read_judged_groups,
)
from asterism.configs.errors import UnusableInput


class RefilteredStep(msgspec.Struct, frozen=True):
    step: int
    difference: SelectionDifference
    trajectories: tuple[CandidateTrajectory, ...]  # trajectories of all groups that the step judged


class RefilteredRun(msgspec.Struct, frozen=True):
    run: str
    settings: tuple[str, ...]  # `key: value in the run -> other value`
    steps: tuple[RefilteredStep, ...]
    all_steps: SelectionDifference
    tasks: dict[str, SelectionDifference]  # difference over all steps, by task; empty without [[tasks]]


class OtherFilters(NamedTuple):
    """The groups of a run judged with other Resample-on-Correct settings. Implements WhatIf."""

    step: int | None  # number of the step to show; None: all steps
    tables = ("roc",)

    @classmethod
    def parse(cls, step: str) -> Self:
        """Parse a step number or "all". Raises UnusableInput."""
        try:
            return cls(None if step == "all" else int(step))
        except ValueError:
            raise UnusableInput(f'--step {step}: must be a step number or "all"') from None

    def recompute(self, conditions: Conditions) -> RefilteredRun:
        """Judge the groups again. If a step ran twice, as after a resume, the later one counts."""
        folder, steps = conditions.folder, dict[int, RefilteredStep]()
        for number, groups in read_judged_groups(conditions.run, folder):
            steps = {earlier: each for earlier, each in steps.items() if earlier < number}
            trajectories = [each for group in groups for each in list_candidates(group, conditions.other)]
            steps[number] = RefilteredStep(number, compute_difference(trajectories), tuple(trajectories))
        if not steps:
            raise UnusableInput(f"{folder.events}: no step has all of its events")
        if self.step is not None and self.step not in steps:
            raise UnusableInput(f"--step {self.step}: {folder.path} has steps {min(steps)} to {max(steps)}")
        chosen = tuple(steps.values()) if self.step is None else (steps[self.step],)
        trajectories = [each for step in chosen for each in step.trajectories]
        names = sorted({each.task for each in trajectories if each.task})
        tasks = {name: compute_difference([each for each in trajectories if each.task == name]) for name in names}
        return RefilteredRun(str(folder.path), conditions.settings, chosen, compute_difference(trajectories), tasks)

    def show(self, result: RefilteredRun, console: Console) -> int:
        print_heading(console, result.run, "filtered again", result.settings)
        if not result.settings:
            judged = f"{len(result.steps)} steps keep the same {result.all_steps.both} trajectories"
            print_line(console, f"nothing changes: {judged}; use --set, such as --set roc.penalty=release")
            return 0
        table = make_table(
            *(">step", ">groups", ">kept", ">kept by both", ">|Δ advantage|", ">failed calls in positives", ">tokens")
        )
        for step in result.steps:
            table.add_row(str(step.step), *_format_cells(step.difference))
        if len(result.steps) > 1:
            table.add_section()
            table.add_row("all", *_format_cells(result.all_steps), style="bold")
        for name, difference in result.tasks.items():
            table.add_row(escape(name), *_format_cells(difference))
        console.print(table)
        _show_components(result.all_steps, console)
        if len(result.steps) == 1:
            _show_groups(result.steps[0], console)
        return 0


def _show_components(difference: SelectionDifference, console: Console) -> None:
    """Print the means over the kept trajectories, unless the reward has only one component."""
    names = sorted({*difference.run.component_means, *difference.other.component_means})
    if len(names) < 2:
        return
    parts = [f"reward {_format_change(difference, lambda kept: kept.reward_mean, '.3f')}"]
    for name in names:
        parts.append(
            f"{name} {_format_change(difference, lambda kept, name=name: kept.component_means.get(name), '.3f')}"
        )
    print_line(console, f"means of the kept: {'; '.join(parts)}")


def _format_cells(each: SelectionDifference) -> list[str]:
    return [
        _format_change(each, lambda kept: kept.groups, "d"),
        _format_change(each, lambda kept: kept.trajectories, "d"),
        str(each.both),
        "-" if each.advantage_change_mean is None else f"{each.advantage_change_mean:.3f}",
        _format_change(each, lambda kept: kept.failed_call_share, ".1%"),
        _format_change(each, lambda kept: kept.response_tokens_mean, ".0f"),
    ]


def _format_change(each: SelectionDifference, get_value: Callable[[SelectionStats], float | None], form: str) -> str:
    """Format the run's value, and after it the other value if it differs."""
    before, after = (
        "-" if (value := get_value(kept)) is None else format(value, form) for kept in (each.run, each.other)
    )
    return before if before == after else f"{before} -> {after}"


def _show_groups(step: RefilteredStep, console: Console) -> None:
    """Print the groups for which the selections differ."""
    for group_id in sorted({each.group_id for each in step.trajectories}):
        members = [each for each in step.trajectories if each.group_id == group_id]
        ours = [each.trajectory_id for each in members if each.advantage is not None]
        theirs = [each.trajectory_id for each in members if each.other_advantage is not None]
        removed, added = [each for each in ours if each not in theirs], [each for each in theirs if each not in ours]
        if removed or added:
            changes = [f"without {', '.join(map(str, removed))}"] if removed else []
            changes += [f"with {', '.join(map(str, added))}"] if added else []
            print_line(console, f"group {group_id}: {', '.join(changes)}")

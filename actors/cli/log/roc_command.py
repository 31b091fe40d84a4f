"""`asterism log roc`: which trajectories other Resample-on-Correct settings would have selected."""

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from asterism.actors.cli.console import check_json_path, write_json
from asterism.analysis.what_if.roc_refilter import (
    CandidateTrajectory,
    SelectionDifference,
    SelectionStats,
    compute_difference,
    list_candidates,
    read_judged_groups,
)
from asterism.configs.errors import UnusableInput
from asterism.configs.load import list_differences, load_run, load_with_overrides
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema import RunConfig


class RefilteredStep(msgspec.Struct, frozen=True):
    step: int
    difference: SelectionDifference
    trajectories: tuple[CandidateTrajectory, ...]  # of all groups that the step judged


class RefilteredRun(msgspec.Struct, frozen=True):
    run: str
    settings: tuple[str, ...]  # `key: value in the run -> other value`
    steps: tuple[RefilteredStep, ...]
    all_steps: SelectionDifference
    tasks: dict[str, SelectionDifference]  # of all steps, by task; empty without [[tasks]]


def print_refiltered(
    folder: RunFolder, step: str, overrides: Sequence[str], json_path: Path | None, console: Console
) -> None:
    """Raises UnusableInput."""
    check_json_path(json_path)
    refiltered = refilter(folder, load_with_overrides(folder.config, overrides, ("roc",)), _parse_step(step))
    _print_result(refiltered, console)
    write_json(json_path, refiltered)


def refilter(folder: RunFolder, other: RunConfig, only_step: int | None) -> RefilteredRun:
    """If a step ran twice, as after a resume, the later one counts."""
    run = load_run(folder.config)
    steps: dict[int, RefilteredStep] = {}
    for number, groups in read_judged_groups(run, folder):
        steps = {earlier: each for earlier, each in steps.items() if earlier < number}
        trajectories = [each for group in groups for each in list_candidates(group, other)]
        steps[number] = RefilteredStep(number, compute_difference(trajectories), tuple(trajectories))
    if not steps:
        raise UnusableInput(f"{folder.events}: no step has all of its events")
    if only_step is not None and only_step not in steps:
        raise UnusableInput(f"--step {only_step}: {folder.path} has steps {min(steps)} to {max(steps)}")
    chosen = tuple(steps.values()) if only_step is None else (steps[only_step],)
    trajectories = [each for step in chosen for each in step.trajectories]
    names = sorted({each.task for each in trajectories if each.task})
    tasks = {name: compute_difference([each for each in trajectories if each.task == name]) for name in names}
    settings = tuple(list_differences(run, other))
    return RefilteredRun(str(folder.path), settings, chosen, compute_difference(trajectories), tasks)


def _parse_step(step: str) -> int | None:
    if step == "all":
        return None
    try:
        return int(step)
    except ValueError:
        raise UnusableInput(f'--step {step}: must be a step number or "all"') from None


# ---------------------------------------------------------------- output


def _print_result(refiltered: RefilteredRun, console: Console) -> None:
    settings = "; ".join(refiltered.settings) or "the run's own settings"
    console.print(f"{refiltered.run}, filtered again with {settings}", markup=False, highlight=False, soft_wrap=True)
    if not refiltered.settings:
        judged = f"{len(refiltered.steps)} steps keep the same {refiltered.all_steps.both} trajectories"
        console.print(
            f"nothing changes: {judged}; use --set, such as --set roc.penalty=release", highlight=False, soft_wrap=True
        )
        return
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for title in ("step", "groups", "kept", "kept by both", "|Δ advantage|", "failed calls in positives", "tokens"):
        table.add_column(title, justify="right")
    for step in refiltered.steps:
        table.add_row(str(step.step), *_format_cells(step.difference))
    if len(refiltered.steps) > 1:
        table.add_section()
        table.add_row("all", *_format_cells(refiltered.all_steps), style="bold")
    for name, difference in refiltered.tasks.items():
        table.add_row(escape(name), *_format_cells(difference))
    console.print(table)
    _print_components(refiltered.all_steps, console)
    if len(refiltered.steps) == 1:
        _show_groups(refiltered.steps[0], console)


def _print_components(difference: SelectionDifference, console: Console) -> None:
    """Means over the kept trajectories, unless the reward has only one component."""
    names = sorted({*difference.run.component_means, *difference.other.component_means})
    if len(names) < 2:
        return
    parts = [f"reward {_format_change(difference, lambda kept: kept.reward_mean, '.3f')}"]
    for name in names:
        parts.append(
            f"{name} {_format_change(difference, lambda kept, name=name: kept.component_means.get(name), '.3f')}"
        )
    console.print(f"means of the kept: {'; '.join(parts)}", markup=False, highlight=False, soft_wrap=True)


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
    """The run's value, and the other value if it differs."""
    before, after = (
        "-" if (value := get_value(kept)) is None else format(value, form) for kept in (each.run, each.other)
    )
    return before if before == after else f"{before} -> {after}"


def _show_groups(step: RefilteredStep, console: Console) -> None:
    """Prints the groups for which the selections differ."""
    for group_id in sorted({each.group_id for each in step.trajectories}):
        members = [each for each in step.trajectories if each.group_id == group_id]
        ours = [each.trajectory_id for each in members if each.advantage is not None]
        theirs = [each.trajectory_id for each in members if each.other_advantage is not None]
        removed, added = [each for each in ours if each not in theirs], [each for each in theirs if each not in ours]
        if removed or added:
            changes = [f"without {', '.join(map(str, removed))}"] if removed else []
            changes += [f"with {', '.join(map(str, added))}"] if added else []
            console.print(f"group {group_id}: {', '.join(changes)}", highlight=False, soft_wrap=True)

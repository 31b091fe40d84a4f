"""The display shows a run's progress: live bars on a terminal, plain lines elsewhere."""

import time
from collections.abc import Mapping
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column

from asterism.bus.messages import Progress as ProgressMessage

PLAIN_INTERVAL_S = 5.0
_OUTCOME_WIDTH = 14  # width of "512/512 groups"; failures make the column wider
_METRIC_FORMATS = {  # metric -> its format; the components of the reward follow it
    "loss": "loss {:.3f}",
    "reward": "reward {:.3f}",
    "errors_in_positives": "tool errors in positives {:.3f}",
    "response_tokens": "response {:.0f} tokens",
    "tokens_per_s": "{:,.0f} tokens/s",
    "accuracy": "accuracy {:.3f}",
}
_COMPONENT_PREFIX = "reward: "
_MAX_COMPONENTS = 6


class Display(Protocol):
    def show_progress(self, progress: ProgressMessage) -> None: ...

    def print_line(self, text: str) -> None: ...

    def close(self) -> None: ...


def make_display(console: Console, accuracy_label: str = "accuracy") -> Display:
    """Make a display. `accuracy_label` names the share of successes, such as "reward > 0"."""
    return LiveDisplay(console, accuracy_label) if console.is_terminal else PlainDisplay(console, accuracy_label)


def _format_metrics(values: Mapping[str, float], accuracy_label: str) -> str:
    parts: list[str] = []
    for name, form in _METRIC_FORMATS.items():
        if name in values:
            parts.append(form.format(values[name]).replace("accuracy", accuracy_label))
        if name == "reward":
            parts += _format_components(values)
    return "  ".join(parts)


def _format_components(values: Mapping[str, float]) -> list[str]:
    """Format the components; a single component is the reward itself and is not shown."""
    found = {
        name.removeprefix(_COMPONENT_PREFIX): value
        for name, value in values.items()
        if name.startswith(_COMPONENT_PREFIX)
    }
    if len(found) < 2:
        return []
    shown = ", ".join(f"{name} {value:.3f}" for name, value in list(found.items())[:_MAX_COMPONENTS])
    return [f"({shown}{', ...' if len(found) > _MAX_COMPONENTS else ''})"]


def _format_outcome(values: Mapping[str, float]) -> str:
    """Format the groups that a step trains on, failed trajectories, and whether a step changes no weights."""
    parts: list[str] = []
    if groups := values.get("groups"):
        kept = groups - values["groups_rejected"] - values["groups_lost"]
        parts.append(f"{kept:.0f}/{groups:.0f} groups")
    if failed := values.get("failed", values.get("trajectories_failed", 0)):  # key of an evaluation, else of a step
        parts.append(f"{failed:.0f} failed")
    if values.get("updates") == 0:
        parts.append("no update")
    return "  ".join(parts)


def _join_nonempty(*parts: str) -> str:
    return "  ".join(part for part in parts if part)


def _format_evaluation(values: Mapping[str, float], accuracy_label: str) -> str:
    return _join_nonempty(_format_metrics(values, accuracy_label), _format_outcome(values))


class LiveDisplay:
    """A display with one bar per stage, followed by the metrics of the last step.

    A narrow terminal shortens only the metrics, which come last.
    """

    def __init__(self, console: Console, accuracy_label: str = "accuracy") -> None:
        self._accuracy_label = accuracy_label
        is_wide = console.width >= 120
        whole = [Column(no_wrap=True, min_width=width) for width in (24 if is_wide else 4, 7, 5, _OUTCOME_WIDTH)]
        columns = (
            TextColumn("[bold]{task.description}", table_column=whole[0]),
            BarColumn(bar_width=24 if is_wide else 8),
            TextColumn("{task.completed:.0f}/{task.total:.0f}", table_column=whole[1]),
            TimeRemainingColumn(compact=True, table_column=whole[2]),
            TextColumn("{task.fields[outcome]}", table_column=whole[3]),
            TextColumn("{task.fields[numbers]}", table_column=Column(no_wrap=True, ratio=1)),
        )
        self._bars = Progress(*columns, console=console, expand=True)
        self._tasks: dict[str, TaskID] = {}
        self._bars.start()

    def show_progress(self, progress: ProgressMessage) -> None:
        if progress.stage.startswith("evaluation"):  # an evaluation has no steps
            shown = _format_evaluation(progress.values, self._accuracy_label)
            self._bars.console.print(f"{progress.stage:<24} {shown}")
            return
        if progress.stage not in self._tasks:
            self._tasks[progress.stage] = self._bars.add_task(
                progress.stage, total=progress.steps, numbers="", outcome=""
            )
        self._bars.update(
            self._tasks[progress.stage],
            completed=progress.step,
            numbers=_format_metrics(progress.values, self._accuracy_label),
            outcome=_format_outcome(progress.values),
        )

    def print_line(self, text: str) -> None:
        self._bars.console.print(text, markup=False, emoji=False, highlight=False)

    def close(self) -> None:
        self._bars.stop()


class PlainDisplay:
    """A display that prints a line every PLAIN_INTERVAL_S, and one at the end of each stage."""

    def __init__(self, console: Console, accuracy_label: str = "accuracy") -> None:
        self._console, self._accuracy_label = console, accuracy_label
        self._stage_starts: dict[str, tuple[float, int]] = {}  # stage -> time and number of its first shown step
        self._last_shown_s = float("-inf")

    def show_progress(self, progress: ProgressMessage) -> None:
        now = time.monotonic()
        began, first = self._stage_starts.setdefault(progress.stage, (now, progress.step))
        is_evaluation = progress.stage.startswith("evaluation")
        if now - self._last_shown_s < PLAIN_INTERVAL_S and progress.step < progress.steps and not is_evaluation:
            return
        self._last_shown_s = now
        if is_evaluation:
            shown = _format_evaluation(progress.values, self._accuracy_label)
            self.print_line(f"{time.strftime('%H:%M:%S')} {progress.stage}: {shown}")
            return
        done = progress.step - first
        left = f"{(now - began) / done * (progress.steps - progress.step):.0f} s left" if done > 0 else ""
        shown = _join_nonempty(
            left, _format_outcome(progress.values), _format_metrics(progress.values, self._accuracy_label)
        )
        head = f"{time.strftime('%H:%M:%S')} {progress.stage} {progress.step}/{progress.steps}"
        self.print_line(f"{head}: {shown}" if shown else head)

    def print_line(self, text: str) -> None:
        self._console.print(text, markup=False, emoji=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        pass

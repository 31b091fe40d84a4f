"""Shows a run's progress: live bars on a terminal, plain lines elsewhere."""

import time
from collections.abc import Mapping
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from bus.messages import Progress as ProgressMessage

PLAIN_INTERVAL_S = 5.0
_METRIC_FORMATS = {  # metric: how it is shown
    "loss": "loss {:.3f}",
    "reward": "reward {:.3f}",
    "errors_in_positives": "tool errors in positives {:.3f}",
    "response_tokens": "response {:.0f} tokens",
    "tokens_per_s": "{:,.0f} tokens/s",
    "accuracy": "accuracy {:.3f}",
}


class Display(Protocol):
    def show_progress(self, progress: ProgressMessage) -> None: ...

    def print_line(self, text: str) -> None: ...

    def close(self) -> None: ...


def make_display(console: Console) -> Display:
    return LiveDisplay(console) if console.is_terminal else PlainDisplay(console)


def _format_metrics(values: Mapping[str, float]) -> str:
    shown = [form.format(values[name]) for name, form in _METRIC_FORMATS.items() if name in values]
    failed = values.get("failed", values.get("trajectories_failed", 0))  # of an evaluation, of a step
    return "  ".join([*shown, *([f"{failed:.0f} failed"] if failed else [])])


class LiveDisplay:
    """One bar per stage, followed by the metrics of the last step."""

    def __init__(self, console: Console) -> None:
        columns = (
            TextColumn("[bold]{task.description:<24}"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[numbers]}"),
        )
        self._bars = Progress(*columns, console=console)
        self._tasks: dict[str, TaskID] = {}
        self._bars.start()

    def show_progress(self, progress: ProgressMessage) -> None:
        if progress.stage.startswith("evaluation"):  # an evaluation has no steps
            self._bars.console.print(f"{progress.stage:<24} {_format_metrics(progress.values)}")
            return
        if progress.stage not in self._tasks:
            self._tasks[progress.stage] = self._bars.add_task(progress.stage, total=progress.steps, numbers="")
        self._bars.update(
            self._tasks[progress.stage], completed=progress.step, numbers=_format_metrics(progress.values)
        )

    def print_line(self, text: str) -> None:
        self._bars.console.print(text, markup=False, emoji=False, highlight=False)

    def close(self) -> None:
        self._bars.stop()


class PlainDisplay:
    """A line every PLAIN_INTERVAL_S, and one at the end of each stage."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._stage_starts: dict[str, tuple[float, int]] = {}  # by stage: time and number of its first shown step
        self._last_shown_s = float("-inf")

    def show_progress(self, progress: ProgressMessage) -> None:
        now = time.monotonic()
        began, first = self._stage_starts.setdefault(progress.stage, (now, progress.step))
        is_evaluation = progress.stage.startswith("evaluation")
        if now - self._last_shown_s < PLAIN_INTERVAL_S and progress.step < progress.steps and not is_evaluation:
            return
        self._last_shown_s = now
        if is_evaluation:
            self.print_line(f"{progress.stage}: {_format_metrics(progress.values)}")
            return
        done = progress.step - first
        left = f"  {(now - began) / done * (progress.steps - progress.step):.0f} s left" if done > 0 else ""
        self.print_line(f"{progress.stage} {progress.step}/{progress.steps}: {_format_metrics(progress.values)}{left}")

    def print_line(self, text: str) -> None:
        self._console.print(text, markup=False, emoji=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        pass

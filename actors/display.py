"""What a run shows while it goes on: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from bus.messages import Progress as ProgressMessage

PLAIN_EVERY_S = 5.0
_SHOWN = {  # metric: how it is shown
    "loss": "loss {:.3f}",
    "reward": "reward {:.3f}",
    "errors_in_positives": "tool errors in positives {:.3f}",
    "response_tokens": "response {:.0f} tokens",
    "tokens_per_s": "{:,.0f} tokens/s",
    "accuracy": "accuracy {:.3f}",
}


class Display(Protocol):
    def show(self, progress: ProgressMessage) -> None: ...

    def say(self, text: str) -> None: ...

    def close(self) -> None: ...


def display_for(console: Console) -> Display:
    return LiveDisplay(console) if console.is_terminal else PlainDisplay(console)


def _numbers(values: Mapping[str, float]) -> str:
    return "  ".join(form.format(values[name]) for name, form in _SHOWN.items() if name in values)


class LiveDisplay:
    """One bar a stage, the numbers of the last step beside it."""

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

    def show(self, progress: ProgressMessage) -> None:
        if progress.stage.startswith("evaluation"):  # it has no steps of its own
            self._bars.console.print(f"{progress.stage:<24} {_numbers(progress.values)}")
            return
        if progress.stage not in self._tasks:
            self._tasks[progress.stage] = self._bars.add_task(progress.stage, total=progress.steps, numbers="")
        self._bars.update(self._tasks[progress.stage], completed=progress.step, numbers=_numbers(progress.values))

    def say(self, text: str) -> None:
        self._bars.console.print(text, markup=False, emoji=False, highlight=False)

    def close(self) -> None:
        self._bars.stop()


class PlainDisplay:
    """A line now and then, and one at each end of a stage."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began: dict[str, tuple[float, int]] = {}  # stage: when its first step was shown, and which
        self._last_s = float("-inf")

    def show(self, progress: ProgressMessage) -> None:
        now = time.monotonic()
        began, first = self._began.setdefault(progress.stage, (now, progress.step))
        is_evaluation = progress.stage.startswith("evaluation")
        if now - self._last_s < PLAIN_EVERY_S and progress.step < progress.steps and not is_evaluation:
            return
        self._last_s = now
        if is_evaluation:
            self.say(f"{progress.stage}: {_numbers(progress.values)}")
            return
        done = progress.step - first
        left = f"  {(now - began) / done * (progress.steps - progress.step):.0f} s left" if done > 0 else ""
        self.say(f"{progress.stage} {progress.step}/{progress.steps}: {_numbers(progress.values)}{left}")

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, emoji=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        pass

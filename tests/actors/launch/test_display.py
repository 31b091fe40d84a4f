"""The progress display, on a terminal and elsewhere."""

import io
import re
from collections.abc import Iterator

import pytest
from rich.console import Console

from actors.launch import display
from actors.launch.display import Display, LiveDisplay, PlainDisplay, make_display
from bus.messages import Progress

HOSTILE = "runs/a[b]c has [/no] markup, nor x[:100:2]"


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(display, "time", clock)
    return clock


@pytest.fixture
def terminal() -> Iterator[LiveDisplay]:
    shown = make_display(Console(force_terminal=True, width=160, file=io.StringIO()))
    assert isinstance(shown, LiveDisplay)
    yield shown
    shown.close()


def read_output(shown: LiveDisplay) -> str:
    """Close the display and return its output without colours and cursor movements."""
    shown.close()
    file = shown._bars.console.file  # pyright: ignore[reportPrivateUsage]
    assert isinstance(file, io.StringIO)
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", file.getvalue())


def make_plain_display() -> tuple[Display, io.StringIO]:
    file = io.StringIO()
    return make_display(Console(file=file, width=40)), file


def test_without_a_terminal_a_stage_prints_lines_at_intervals_and_one_at_its_end(clock: Clock) -> None:
    shown, file = make_plain_display()
    assert isinstance(shown, PlainDisplay)
    for step in range(1, 9):
        shown.show_progress(Progress("rl", step, 8, {"loss": 0.25, "tokens_per_s": 12_345.0}))
        clock.now += 2.0
    lines = file.getvalue().splitlines()
    assert lines == [
        "rl 1/8: loss 0.250  12,345 tokens/s",
        "rl 4/8: loss 0.250  12,345 tokens/s  8 s left",
        "rl 7/8: loss 0.250  12,345 tokens/s  2 s left",
        "rl 8/8: loss 0.250  12,345 tokens/s  0 s left",
    ]


def test_an_evaluation_is_printed_immediately(clock: Clock) -> None:
    shown, file = make_plain_display()
    shown.show_progress(Progress("rl", 1, 8, {"reward": 0.5}))
    shown.show_progress(Progress("evaluation after rl", 1, 8, {"accuracy": 0.75, "something_else": 1.0}))
    assert file.getvalue().splitlines() == ["rl 1/8: reward 0.500", "evaluation after rl: accuracy 0.750"]


def test_a_terminal_shows_one_bar_per_stage_with_the_metrics_of_its_last_step(terminal: LiveDisplay) -> None:
    terminal.show_progress(Progress("cold start", 4, 4, {"loss": 1.5}))
    terminal.show_progress(Progress("rl", 1, 3, {"reward": 0.25}))
    terminal.show_progress(Progress("rl", 2, 3, {"reward": 0.5, "response_tokens": 98.6}))
    terminal.show_progress(Progress("evaluation", 0, 0, {"accuracy": 0.75}))
    text = read_output(terminal)
    last = [line for line in text.splitlines() if line.startswith("rl ")][-1]
    assert " 2/3 " in last
    assert last.rstrip().endswith("reward 0.500  response 99 tokens")
    assert any(line.split() == ["evaluation", "accuracy", "0.750"] for line in text.splitlines())
    assert "cold start" in text


def test_lines_are_printed_without_markup(terminal: LiveDisplay) -> None:
    shown, file = make_plain_display()
    shown.print_line(HOSTILE)
    assert file.getvalue() == f"{HOSTILE}\n"
    terminal.print_line(HOSTILE)
    assert HOSTILE in read_output(terminal)

"""What a run shows while it goes on, on a terminal and elsewhere."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator

import pytest
from rich.console import Console

from actors import display
from actors.display import Display, LiveDisplay, PlainDisplay, display_for
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
    shown = display_for(Console(force_terminal=True, width=160, file=io.StringIO()))
    assert isinstance(shown, LiveDisplay)
    yield shown
    shown.close()


def seen(shown: LiveDisplay) -> str:
    """Without colours and movements of the cursor, once it is closed."""
    shown.close()
    file = shown._bars.console.file  # pyright: ignore[reportPrivateUsage]
    assert isinstance(file, io.StringIO)
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", file.getvalue())


def plain() -> tuple[Display, io.StringIO]:
    file = io.StringIO()
    return display_for(Console(file=file, width=40)), file


def test_elsewhere_than_on_a_terminal_a_stage_has_a_line_now_and_then_and_one_at_its_end(clock: Clock) -> None:
    shown, file = plain()
    assert isinstance(shown, PlainDisplay)
    for step in range(1, 9):
        shown.show(Progress("rl", step, 8, {"loss": 0.25, "tokens_per_s": 12_345.0}))
        clock.now += 2.0
    lines = file.getvalue().splitlines()
    assert lines == [
        "rl 1/8: loss 0.250  12,345 tokens/s",
        "rl 4/8: loss 0.250  12,345 tokens/s  8 s left",
        "rl 7/8: loss 0.250  12,345 tokens/s  2 s left",
        "rl 8/8: loss 0.250  12,345 tokens/s  0 s left",
    ]


def test_an_evaluation_is_said_at_once(clock: Clock) -> None:
    shown, file = plain()
    shown.show(Progress("rl", 1, 8, {"reward": 0.5}))
    shown.show(Progress("evaluation after rl", 1, 8, {"accuracy": 0.75, "something_else": 1.0}))
    assert file.getvalue().splitlines() == ["rl 1/8: reward 0.500", "evaluation after rl: accuracy 0.750"]


def test_a_terminal_has_a_bar_a_stage_with_the_numbers_of_its_last_step(terminal: LiveDisplay) -> None:
    terminal.show(Progress("cold start", 4, 4, {"loss": 1.5}))
    terminal.show(Progress("rl", 1, 3, {"reward": 0.25}))
    terminal.show(Progress("rl", 2, 3, {"reward": 0.5, "response_tokens": 98.6}))
    terminal.show(Progress("evaluation", 0, 0, {"accuracy": 0.75}))
    text = seen(terminal)
    last = [line for line in text.splitlines() if line.startswith("rl ")][-1]
    assert " 2/3 " in last
    assert last.rstrip().endswith("reward 0.500  response 99 tokens")
    assert any(line.split() == ["evaluation", "accuracy", "0.750"] for line in text.splitlines())
    assert "cold start" in text


def test_what_is_said_is_shown_as_it_is(terminal: LiveDisplay) -> None:
    shown, file = plain()
    shown.say(HOSTILE)
    assert file.getvalue() == f"{HOSTILE}\n"
    terminal.say(HOSTILE)
    assert HOSTILE in seen(terminal)

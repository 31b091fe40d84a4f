"""The display shows progress on a terminal and elsewhere."""

import io
import re
from collections.abc import Iterator

import pytest
from rich.console import Console

from asterism.actors.launch import display
from asterism.actors.launch.display import Display, LiveDisplay, PlainDisplay, make_display
from asterism.bus.messages import Progress

HOSTILE = "runs/a[b]c has [/no] markup, nor x[:100:2]"


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def strftime(self, _: str) -> str:
        return "12:00:00"


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
    """Close the display, and return its output without colours and cursor movements."""
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
        "12:00:00 rl 1/8: loss 0.250  12,345 tokens/s",
        "12:00:00 rl 4/8: 8 s left  loss 0.250  12,345 tokens/s",
        "12:00:00 rl 7/8: 2 s left  loss 0.250  12,345 tokens/s",
        "12:00:00 rl 8/8: 0 s left  loss 0.250  12,345 tokens/s",
    ]


def test_an_evaluation_is_printed_immediately(clock: Clock) -> None:
    shown, file = make_plain_display()
    shown.show_progress(Progress("answers", 3, 8, {}))
    shown.show_progress(Progress("evaluation after rl", 1, 8, {"accuracy": 0.75, "something_else": 1.0}))
    assert file.getvalue().splitlines() == [
        "12:00:00 answers 3/8",
        "12:00:00 evaluation after rl: accuracy 0.750",
    ]


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


STEP = {
    **{"loss": 0.255, "reward": 0.02, "errors_in_positives": 0.667, "response_tokens": 45.0, "tokens_per_s": 8435.0},
    **{"groups": 512.0, "groups_rejected": 480.0, "groups_lost": 2.0, "trajectories_failed": 12.0, "updates": 0.0},
}


@pytest.mark.parametrize("width", [80, 110])
def test_a_narrow_terminal_shows_step_remaining_time_groups_and_failures(width: int) -> None:
    shown = make_display(Console(force_terminal=True, width=width, file=io.StringIO()))
    assert isinstance(shown, LiveDisplay)
    shown.show_progress(Progress("rl", 499, 510, {}))
    shown.show_progress(Progress("rl", 500, 510, STEP))
    last = [line for line in read_output(shown).splitlines() if line.startswith("rl ")][-1]
    assert len(last) <= width
    assert re.search(r" 500/510 +(--:--|\d+:\d\d) +30/512 groups  12 failed  no update ", last), last


def test_a_shaped_reward_is_shown_with_components_and_success_rule(clock: Clock) -> None:
    file = io.StringIO()
    shown = make_display(Console(file=file, width=40), "reward > 0")
    values = {"accuracy": 0.9, "reward": 0.35, "reward: correct": 0.25, "reward: format": 1.0}
    shown.show_progress(Progress("evaluation start", 0, 8, values))
    assert file.getvalue() == (
        "12:00:00 evaluation start: reward 0.350  (correct 0.250, format 1.000)  reward > 0 0.900\n"
    )


def test_a_single_component_is_not_repeated(clock: Clock) -> None:
    shown, file = make_plain_display()
    shown.show_progress(Progress("evaluation start", 0, 8, {"accuracy": 0.5, "reward": 0.5, "reward: correct": 0.5}))
    assert file.getvalue() == "12:00:00 evaluation start: reward 0.500  accuracy 0.500\n"


def test_an_evaluation_without_answers_shows_failures_and_no_accuracy(clock: Clock) -> None:
    shown, file = make_plain_display()
    shown.show_progress(Progress("evaluation start", 0, 8, {"questions": 4.0, "failed": 4.0}))
    assert file.getvalue() == "12:00:00 evaluation start: 4 failed\n"

"""What `asterism log fork` prints of an original and its branches."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from rich.console import Console

from actors.fork_command import Branch, Fork
from actors.fork_table import show_fork
from policies.parting import Comparison, Outcome, Parting, Turn

SAID = (Turn(0, "", "let me [bold]count[/]"), Turn(1, "<tool_response>\nstdout:\n[4]\n</tool_response>", "it is 4"))
ORIGINAL = Outcome(5, 1.0, "answered", 2, 1, 0, 98, SAID, (), ())
SAME = Comparison(True, 98, None, None)


def fork(*branches: Branch) -> Fork:
    return Fork("runs/a[b]", 7, 1, "q:1", "4", 1.0, "checkpoints/step_000000", (3,), None, ORIGINAL, branches)


def shown(fork: Fork) -> str:
    console = Console(width=200)
    with console.capture() as captured:
        show_fork(fork, console)
    return captured.get()


def row(text: str, name: str) -> list[str]:
    """Of the table, whose lines are indented."""
    return next(line.split() for line in text.splitlines() if line.startswith(f" {name}"))


def test_a_branch_that_is_the_original_again_is_not_told_again() -> None:
    text = shown(fork(Branch(ORIGINAL, SAME)))
    assert text.startswith("trajectory 7 of runs/a[b], q:1, truth '4': from turn 1 on, by checkpoints/step_000000")
    assert row(text, "original") == ["original", "1", "2", "1", "0", "98", "answered"]
    assert row(text, "branch 0")[-1] == "nowhere"
    assert "branch 0 is the original again: all 98 tokens are the same and so are their logprobs" in text
    assert text.count("it is 4") == 1


def test_from_the_turn_on_it_is_told_what_was_given_and_said_as_it_was() -> None:
    text = shown(replace(fork(), turn=0))
    assert "  turn 0  let me [bold]count[/]\n" in text
    assert "stdout: [4]\n  turn 1  it is 4\n" in text
    assert "let me" not in shown(fork())


@pytest.mark.parametrize(
    ("comparison", "parts"),
    [
        (Comparison(False, 50, Parting("turn", 1, 4, 54), 0.0), "turn 1, token 4"),
        (Comparison(False, 50, Parting("result", 1, 4, 54), 0.0), "results before turn 1, token 4"),
        (Comparison(False, 50, None, None), "not in the 50 that both have"),
    ],
)
def test_a_branch_that_parts_says_where_and_is_told(comparison: Comparison, parts: str) -> None:
    longest = "a" * 200 + "z" * 200
    other = replace(
        ORIGINAL, seed=9, reward=None, ending="infrastructure: [gone]", told=(SAID[0], Turn(1, "", longest))
    )
    text = shown(fork(Branch(other, comparison)))
    assert " ".join(row(text, "branch 0")) == f"branch 0 - 2 1 0 98 infrastructure: [gone] {parts}"
    assert "branch 0, seed 9\n" in text
    assert f"  turn 1  {'a' * 80} ... {'z' * 80}\n" in text


def test_logprobs_that_stray_are_told() -> None:
    assert "their logprobs within 2e-05" in shown(fork(Branch(ORIGINAL, replace(SAME, logprob_difference_max=2e-5))))


def test_what_makes_branches_alike_or_unlike_is_remarked() -> None:
    text = shown(replace(fork(), original_versions=(3, 4), temperature=0.0))
    assert "(the original: by version 3, 4)" in text
    assert "The original's weights changed on the way" in text
    assert "no seed changes its tokens" in text
    assert "(the original: by version unknown)" in shown(replace(fork(), original_versions=()))

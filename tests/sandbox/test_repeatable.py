"""Under strict determinism no memory address reaches a model, nor what a call printed until its time was over."""

from __future__ import annotations

import pytest

from bus.messages import (
    CodeDied,
    CodeOk,
    CodeOutcome,
    CodeOutOfMemory,
    CodeRaised,
    CodeRefused,
    CodeTimedOut,
    Output,
)
from sandbox.repeatable import repeatable

SHOWN, HIDDEN = "<map object at 0x7f8652565a80>", "<map object at 0x000000000000>"


@pytest.mark.parametrize(
    ("said", "seen"),
    [
        (SHOWN, HIDDEN),
        (f"[{SHOWN}, {SHOWN}]\n", f"[{HIDDEN}, {HIDDEN}]\n"),
        ("<f at 0x55d0c0ffee00>, 3", "<f at 0x000000000000>, 3"),
        ("cut off: <map object at 0x7f86", "cut off: <map object at 0x0000"),
        ("0x7f8652565a80", "0x7f8652565a80"),
        ("the register at 0x7f86 holds", "the register at 0x7f86 holds"),
        ("<f at 0x7f8652565a80ffffff>", "<f at 0x7f8652565a80ffffff>"),
        ("", ""),
    ],
)
def test_an_address_becomes_zeros_and_all_else_stays(said: str, seen: str) -> None:
    assert repeatable(CodeOk(Output(said))) == CodeOk(Output(seen))


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (CodeOk(Output("", SHOWN, 3, 4)), CodeOk(Output("", HIDDEN, 3, 4))),
        (CodeTimedOut(Output("1\n2\n", "3", 4, 5), 4.0), CodeTimedOut(Output(), 4.0)),
        (CodeOutOfMemory(Output(SHOWN), 512), CodeOutOfMemory(Output(HIDDEN), 512)),
        (CodeDied(Output(SHOWN), -9), CodeDied(Output(HIDDEN), -9)),
        (CodeRefused(SHOWN), CodeRefused(SHOWN)),
        (
            CodeRaised(Output(SHOWN), f"E: {SHOWN}", f"line 1\nE: {SHOWN}"),
            CodeRaised(Output(HIDDEN), f"E: {HIDDEN}", f"line 1\nE: {HIDDEN}"),
        ),
    ],
)
def test_every_outcome_is_covered(outcome: CodeOutcome, expected: CodeOutcome) -> None:
    assert repeatable(outcome) == expected

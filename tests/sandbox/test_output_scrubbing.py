"""Outcomes under strict determinism have no memory addresses and no output before a timeout."""

import pytest

from asterism.bus.messages import (
    CodeCrashed,
    CodeOk,
    CodeOutcome,
    CodeOutOfMemory,
    CodeRaised,
    CodeRefused,
    CodeTimedOut,
    Output,
)
from asterism.sandbox.output_scrubbing import scrub_outcome

SHOWN, HIDDEN = "<map object at 0x7f8652565a80>", "<map object at 0x000000000000>"


@pytest.mark.parametrize(
    ("text", "scrubbed"),
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
def test_only_the_digits_of_addresses_become_zeros(text: str, scrubbed: str) -> None:
    assert scrub_outcome(CodeOk(Output(text))) == CodeOk(Output(scrubbed))


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (CodeOk(Output("", SHOWN, 3, 4)), CodeOk(Output("", HIDDEN, 3, 4))),
        (CodeTimedOut(Output("1\n2\n", "3", 4, 5), 4.0), CodeTimedOut(Output(), 4.0)),
        (CodeOutOfMemory(Output(SHOWN), 512), CodeOutOfMemory(Output(HIDDEN), 512)),
        (CodeCrashed(Output(SHOWN), -9), CodeCrashed(Output(HIDDEN), -9)),
        (CodeRefused(SHOWN), CodeRefused(SHOWN)),
        (
            CodeRaised(Output(SHOWN), f"E: {SHOWN}", f"line 1\nE: {SHOWN}"),
            CodeRaised(Output(HIDDEN), f"E: {HIDDEN}", f"line 1\nE: {HIDDEN}"),
        ),
    ],
)
def test_every_kind_of_outcome_is_scrubbed(outcome: CodeOutcome, expected: CodeOutcome) -> None:
    assert scrub_outcome(outcome) == expected

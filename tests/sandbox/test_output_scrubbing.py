"""Under strict determinism, outcomes contain no memory addresses, and a timeout contains no output."""

import pytest

from asterism.bus import messages as msg
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
    assert scrub_outcome(msg.CodeOk(msg.Output(text))) == msg.CodeOk(msg.Output(scrubbed))


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (msg.CodeOk(msg.Output("", SHOWN, 3, 4)), msg.CodeOk(msg.Output("", HIDDEN, 3, 4))),
        (msg.CodeTimedOut(msg.Output("1\n2\n", "3", 4, 5), 4.0), msg.CodeTimedOut(msg.Output(), 4.0)),
        (msg.CodeOutOfMemory(msg.Output(SHOWN), 512), msg.CodeOutOfMemory(msg.Output(HIDDEN), 512)),
        (msg.CodeCrashed(msg.Output(SHOWN), -9), msg.CodeCrashed(msg.Output(HIDDEN), -9)),
        (msg.CodeRefused(SHOWN), msg.CodeRefused(SHOWN)),
        (
            msg.CodeRaised(msg.Output(SHOWN), f"E: {SHOWN}", f"line 1\nE: {SHOWN}"),
            msg.CodeRaised(msg.Output(HIDDEN), f"E: {HIDDEN}", f"line 1\nE: {HIDDEN}"),
        ),
    ],
)
def test_every_kind_of_outcome_is_scrubbed(outcome: msg.CodeOutcome, expected: msg.CodeOutcome) -> None:
    assert scrub_outcome(outcome) == expected

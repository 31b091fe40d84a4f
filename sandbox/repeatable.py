"""What a model may see of a call under strict determinism: nothing that is another time another thing.

Python shows an object that has no text of its own with its address, `<map object at 0x7f8652565a80>`, which is another one
in every process: zeros stand in its place. How much a call had printed when its time was over depends on the machine's
speed: it is left out.
"""

from __future__ import annotations

import re
from typing import assert_never

from msgspec.structs import replace

from bus.messages import CodeDied, CodeOk, CodeOutcome, CodeOutOfMemory, CodeRaised, CodeRefused, CodeTimedOut, Output

# Nine digits or more: what a process of 64 bits gets. Fewer where the limit of the output cut one off.
_ADDRESS = re.compile(r"(?<= at 0x)(?:[0-9a-f]{9,16}\b|[0-9a-f]{1,8}\Z)")


def repeatable(outcome: CodeOutcome) -> CodeOutcome:
    """What is not left out keeps its length."""
    match outcome:
        case CodeRefused():
            return outcome
        case CodeTimedOut():
            return replace(outcome, output=Output())
        case CodeRaised(output=output, error=error, traceback=traceback):
            return replace(outcome, output=_plain(output), error=_masked(error), traceback=_masked(traceback))
        case CodeOk() | CodeOutOfMemory() | CodeDied():
            return replace(outcome, output=_plain(outcome.output))
        case _:
            assert_never(outcome)


def _plain(output: Output) -> Output:
    return replace(output, stdout=_masked(output.stdout), stderr=_masked(output.stderr))


def _masked(text: str) -> str:
    return _ADDRESS.sub(lambda found: "0" * len(found[0]), text) if " at 0x" in text else text

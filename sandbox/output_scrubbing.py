"""Removes the varying parts of a call's output under strict determinism.

The default `repr` of a Python object contains its address (`<map object at 0x7f8652565a80>`), which
differs between processes: zeros replace the address. The amount of output before a timeout depends
on the machine's speed: this output is dropped.
"""

import re
from typing import assert_never

from msgspec.structs import replace

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

# Addresses of a 64-bit process have at least nine digits, or fewer if the output limit cut an address.
_ADDRESS = re.compile(r"(?<= at 0x)(?:[0-9a-f]{9,16}\b|[0-9a-f]{1,8}\Z)")


def scrub_outcome(outcome: CodeOutcome) -> CodeOutcome:
    """Mask the addresses in an outcome, or drop the output of a timeout. Masked output keeps its length."""
    match outcome:
        case CodeRefused():
            return outcome
        case CodeTimedOut():
            return replace(outcome, output=Output())
        case CodeRaised(output=output, error=error, traceback=traceback):
            return replace(
                outcome,
                output=_scrub_output(output),
                error=_mask_addresses(error),
                traceback=_mask_addresses(traceback),
            )
        case CodeOk() | CodeOutOfMemory() | CodeCrashed():
            return replace(outcome, output=_scrub_output(outcome.output))
        case _:
            assert_never(outcome)


def _scrub_output(output: Output) -> Output:
    return replace(output, stdout=_mask_addresses(output.stdout), stderr=_mask_addresses(output.stderr))


def _mask_addresses(text: str) -> str:
    return _ADDRESS.sub(lambda found: "0" * len(found[0]), text) if " at 0x" in text else text

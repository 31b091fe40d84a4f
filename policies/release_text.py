"""A call's result in the words of rStar2-Agent's public release, whose RoC counts the word "error" in them.

    Tool call success              Tool call failure
    stdout: 58                     reason: worker_timeout
                                   stdout: 1
                                   stderr: NameError at line 1: name 'x' is not defined
                                     print(x)

What its code does, followed here: the streams stand as they are, line break at the end included, and a stream without
text has no line; an exception is one line on stderr, with its line of code below it; `reason:` is empty but for a
time-out; each stream is kept up to 1,000 characters, and then the middle of the whole is cut out beyond the limit. A
call that does not parse, and one that cannot be run, get a sentence in place of all this.

Left out is its last line, `execution time: 0.02s`: a clock in the text would make no two runs alike.
"""

from __future__ import annotations

import re
from typing import assert_never

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

_STREAM_CHARACTERS = 1000  # what its judge keeps of each stream
_CUT = "...(truncated)..."
_TIMED_OUT = "worker_timeout"
_PARSE_ERROR = "JSONDecodeError: "  # how policies.dialogue begins, and the release does not
_LINE = re.compile(r'^ +File ".*", line (\d+)', re.MULTILINE)


def release_text(outcome: CodeOutcome, limit: int, code: str = "") -> str:
    """`code` is what was run, whose failing line is shown; it is left out where the code is not known."""
    match outcome:
        case CodeOk(output=output) | CodeDied(output=output, exit_code=0):
            lines = ["Tool call success", *_streams(output)]
        case CodeRaised(output=output):
            lines = _failure("", output, _exception_line(outcome, code))
        case CodeTimedOut(output=output):
            lines = _failure(_TIMED_OUT, output)
        case CodeOutOfMemory(output=output):
            lines = _failure("", output, "MemoryError: \n")
        case CodeDied(output=output):
            lines = _failure("", output)
        case CodeRefused(reason=reason):
            lines = [f"Error when executing tool: {reason}"]
        case _:
            assert_never(outcome)
    return _cut("\n".join(lines), limit)


def release_malformed_text(error: str, limit: int) -> str:
    if error.startswith(_PARSE_ERROR):
        return _cut(f"Failed to decode tool call: {error.removeprefix(_PARSE_ERROR)}", limit)
    return _cut(f"Error when executing tool: {error}", limit)


def release_not_run_text(reason: str, limit: int) -> str:
    """The release lets a surplus call pass in silence; here each call has a result, without the word "error"."""
    return _cut("\n".join(_failure(reason, Output())), limit)


def _failure(reason: str, output: Output, exception: str = "") -> list[str]:
    return ["Tool call failure", f"reason: {reason}", *_streams(output, exception)]


def _streams(output: Output, exception: str = "") -> list[str]:
    streams = (("stdout", output.stdout), ("stderr", output.stderr + exception))
    return [f"{name}: {text[:_STREAM_CHARACTERS]}" for name, text in streams if text]


def _exception_line(raised: CodeRaised, code: str) -> str:
    """ "NameError at line 1: name 'x' is not defined", and that line; the innermost frame's number, as in the release."""
    name, _, message = raised.error.partition(": ")
    name = name.rpartition(".")[2]
    numbers = _LINE.findall(raised.traceback)
    if not numbers:
        return f"{name}: {message}\n"
    number, lines = int(numbers[-1]), code.splitlines()
    if not raised.traceback.startswith("Traceback"):  # it did not compile
        message = f"{message} (<unknown>, line {number})"
    failing = f"\n  {lines[number - 1]}" if 0 < number <= len(lines) else ""
    return f"{name} at line {number}: {message}{failing}\n"


def _cut(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}{_CUT}{text[len(text) - half :]}"

"""Formats call results like rStar2-Agent's public release; its RoC counts the word "error" in
them.

    Tool call success              Tool call failure
    stdout: 58                     reason: worker_timeout
                                   stdout: 1
                                   stderr: NameError at line 1: name 'x' is not defined
                                     print(x)

Followed here: streams are unchanged, with their trailing line break; an empty stream has no line;
an exception is one line on stderr, followed by its line of code; `reason:` is empty except for a
timeout; each stream is cut at 1,000 characters, then the middle of the whole text beyond the
limit. Malformed calls and calls that cannot be run get a sentence instead.

The release's last line, `execution time: 0.02s`, is left out: it would make runs irreproducible.
"""

from __future__ import annotations

import re
from typing import assert_never

from bus.messages import (
    CodeCrashed,
    CodeOk,
    CodeOutcome,
    CodeOutOfMemory,
    CodeRaised,
    CodeRefused,
    CodeTimedOut,
    Output,
)

_MAX_STREAM_CHARACTERS = 1000  # the limit of the release's code judge
_TRUNCATION_MARK = "...(truncated)..."
_TIMED_OUT = "worker_timeout"
_PARSE_ERROR = "JSONDecodeError: "  # prefix of policies.dialogue.parse_turn that the release lacks
_LINE_PATTERN = re.compile(r'^ +File ".*", line (\d+)', re.MULTILINE)


def format_release_result(outcome: CodeOutcome, limit: int, code: str = "") -> str:
    """`code` is the code that ran, to show its failing line; empty if unknown."""
    match outcome:
        case CodeOk(output=output) | CodeCrashed(output=output, exit_code=0):
            lines = ["Tool call success", *_format_streams(output)]
        case CodeRaised(output=output):
            lines = _format_failure("", output, _format_exception(outcome, code))
        case CodeTimedOut(output=output):
            lines = _format_failure(_TIMED_OUT, output)
        case CodeOutOfMemory(output=output):
            lines = _format_failure("", output, "MemoryError: \n")
        case CodeCrashed(output=output):
            lines = _format_failure("", output)
        case CodeRefused(reason=reason):
            lines = [f"Error when executing tool: {reason}"]
        case _:
            assert_never(outcome)
    return _truncate_middle("\n".join(lines), limit)


def format_release_malformed_call(error: str, limit: int) -> str:
    if error.startswith(_PARSE_ERROR):
        return _truncate_middle(f"Failed to decode tool call: {error.removeprefix(_PARSE_ERROR)}", limit)
    return _truncate_middle(f"Error when executing tool: {error}", limit)


def format_release_call_not_run(reason: str, limit: int) -> str:
    """The release ignores a surplus call; here each call has a result, without the word "error"."""
    return _truncate_middle("\n".join(_format_failure(reason, Output())), limit)


def _format_failure(reason: str, output: Output, exception: str = "") -> list[str]:
    return ["Tool call failure", f"reason: {reason}", *_format_streams(output, exception)]


def _format_streams(output: Output, exception: str = "") -> list[str]:
    streams = (("stdout", output.stdout), ("stderr", output.stderr + exception))
    return [f"{name}: {text[:_MAX_STREAM_CHARACTERS]}" for name, text in streams if text]


def _format_exception(raised: CodeRaised, code: str) -> str:
    """ "NameError at line 1: name 'x' is not defined" and that line, for the innermost frame."""
    name, _, message = raised.error.partition(": ")
    name = name.rpartition(".")[2]
    numbers = _LINE_PATTERN.findall(raised.traceback)
    if not numbers:
        return f"{name}: {message}\n"
    number, lines = int(numbers[-1]), code.splitlines()
    if not raised.traceback.startswith("Traceback"):  # it did not compile
        message = f"{message} (<unknown>, line {number})"
    failing = f"\n  {lines[number - 1]}" if 0 < number <= len(lines) else ""
    return f"{name} at line {number}: {message}{failing}\n"


def _truncate_middle(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}{_TRUNCATION_MARK}{text[len(text) - half :]}"

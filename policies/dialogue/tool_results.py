"""Formats the outcome of a tool call as the text that the model reads.

The format "rstar2_release" follows rStar2-Agent's public release; its RoC counts the word "error".

    Tool call success              Tool call failure
    stdout: 58                     reason: worker_timeout
                                   stdout: 1
                                   stderr: NameError at line 1: name 'x' is not defined
                                     print(x)

In this format, streams keep their trailing line break; an empty stream has no line; an exception is one line
on stderr, followed by its line of code; `reason:` is empty except for a timeout; each stream is cut
at 1,000 characters, and a whole text over the limit in its middle. Malformed calls and calls
that cannot be run get a sentence instead. The format omits the release's last line,
`execution time: 0.02s`, which would make runs irreproducible.
"""

import re
from typing import Literal, assert_never

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
from asterism.policies.dialogue.parse_turn import MalformedCall

ResultFormat = Literal["default", "rstar2_release"]

SUCCESS = "Tool call success"
FAILURE = "Tool call failure"

_MAX_STREAM_CHARACTERS = 1000  # the limit of the release's code judge
_PARSE_ERROR = "JSONDecodeError: "  # prefix of asterism.policies.dialogue.parse_turn that the release lacks
_LINE_PATTERN = re.compile(r'^ +File ".*", line (\d+)', re.MULTILINE)


def is_failure(outcome: CodeOutcome) -> bool:
    return not isinstance(outcome, CodeOk)


def contains_error(outcome: CodeOutcome | None, text: str, result_format: ResultFormat = "default") -> bool:
    """Return the release's criterion for a failed call: "error" in the result, in any case.

    A malformed call has `outcome` None. Timeouts and malformed calls count as successes, because the release's texts
    for them lack the word. The default's texts contain the word; the function excludes them.
    """
    if "error" not in text.lower():
        return False
    return result_format == "rstar2_release" or not (outcome is None or isinstance(outcome, CodeTimedOut))


def format_result(outcome: CodeOutcome, limit: int, result_format: ResultFormat = "default", code: str = "") -> str:
    """Format success or failure, the reason, stdout and stderr. `code` is the code that ran, if known.

    The default cuts the middle of each part beyond `limit` characters. The text contains no measured
    time, so that a replay produces the same text.
    """
    if result_format == "rstar2_release":
        return _truncate_release("\n".join(_format_release_lines(outcome, code)), limit)
    match outcome:
        case CodeOk(output=output):
            return "\n".join([SUCCESS, *_format_streams(output, limit)])
        case CodeRaised(output=output, traceback=reason):
            return _format_failure(reason, output, limit)
        case CodeTimedOut(output=output, limit_s=limit_s):
            return _format_failure(f"TimeoutError: no result within {limit_s:g} s", output, limit)
        case CodeOutOfMemory(output=output, limit_mib=limit_mib):
            return _format_failure(f"MemoryError: more than {limit_mib} MiB", output, limit)
        case CodeCrashed(output=output, exit_code=exit_code):
            return _format_failure(f"the process ended with exit code {exit_code}", output, limit)
        case CodeRefused(reason=reason):
            return _format_failure(reason, Output(), limit)
        case _:
            assert_never(outcome)


def format_malformed_call(call: MalformedCall, limit: int, result_format: ResultFormat = "default") -> str:
    if result_format == "rstar2_release":
        head = "Error when executing tool" if call.is_decoded else "Failed to decode tool call"
        return _truncate_release(f"{head}: {call.error.removeprefix(_PARSE_ERROR)}", limit)
    return _format_failure(call.error, Output(), limit)


def format_call_not_run(reason: str, limit: int, result_format: ResultFormat = "default") -> str:
    """Format the result of a valid call beyond the maximum per turn; the release ignores such a call."""
    if result_format == "rstar2_release":
        return _truncate_release("\n".join(_format_release_failure(reason, Output())), limit)
    return _format_failure(reason, Output(), limit)


def _format_failure(reason: str, output: Output, limit: int) -> str:
    return "\n".join([FAILURE, truncate_middle(reason.rstrip("\n"), limit), *_format_streams(output, limit)])


def _format_streams(output: Output, limit: int) -> list[str]:
    streams = (("stdout", output.stdout, output.stdout_cut), ("stderr", output.stderr, output.stderr_cut))
    return [
        f"{name}:\n{truncate_middle(text.rstrip(chr(10)), limit, dropped)}" for name, text, dropped in streams if text
    ]


def truncate_middle(text: str, limit: int, dropped: int = 0) -> str:
    """Cut the middle of `text` beyond `limit`, with a note that also counts the `dropped` bytes at the text's end."""
    if len(text) <= limit and not dropped:
        return text
    head, tail = text[: (limit + 1) // 2], text[len(text) - limit // 2 :] if limit > 1 else ""
    if len(text) <= limit:
        return f"{text}\n... {dropped} bytes cut ..."
    return f"{head}\n... {len(text) - limit + dropped} characters cut ...\n{tail}"


# ---------------------------------------------------------------- the release's format


def _format_release_lines(outcome: CodeOutcome, code: str) -> list[str]:
    match outcome:
        case CodeOk(output=output) | CodeCrashed(output=output, exit_code=0):
            return [SUCCESS, *_format_release_streams(output)]
        case CodeRaised(output=output):
            return _format_release_failure("", output, _format_release_exception(outcome, code))
        case CodeTimedOut(output=output):
            return _format_release_failure("worker_timeout", output)
        case CodeOutOfMemory(output=output):
            return _format_release_failure("", output, "MemoryError: \n")
        case CodeCrashed(output=output):
            return _format_release_failure("", output)
        case CodeRefused(reason=reason):
            return [f"Error when executing tool: {reason}"]
        case _:
            assert_never(outcome)


def _format_release_failure(reason: str, output: Output, exception: str = "") -> list[str]:
    return [FAILURE, f"reason: {reason}", *_format_release_streams(output, exception)]


def _format_release_streams(output: Output, exception: str = "") -> list[str]:
    streams = (("stdout", output.stdout), ("stderr", output.stderr + exception))
    return [f"{name}: {text[:_MAX_STREAM_CHARACTERS]}" for name, text in streams if text]


def _format_release_exception(raised: CodeRaised, code: str) -> str:
    """Format "NameError at line 1: name 'x' is not defined" and that line, for the innermost frame."""
    name, _, message = raised.error.partition(": ")
    name = name.rpartition(".")[2]
    numbers = _LINE_PATTERN.findall(raised.traceback)
    if not numbers:
        return f"{name}: {message}\n"
    number, lines = int(numbers[-1]), code.splitlines()
    if not raised.traceback.startswith("Traceback"):  # a syntax error
        message = f"{message} (<unknown>, line {number})"
    failing = f"\n  {lines[number - 1]}" if 0 < number <= len(lines) else ""
    return f"{name} at line {number}: {message}{failing}\n"


def _truncate_release(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}...(truncated)...{text[len(text) - half :]}"

"""Formats the outcome of a tool call as the text that the model reads."""

from __future__ import annotations

from typing import Literal, assert_never

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
from policies.dialogue.tool_results_release import (
    format_release_call_not_run,
    format_release_malformed_call,
    format_release_result,
)

ResultFormat = Literal["default", "rstar2_release"]

SUCCESS = "Tool call success"
FAILURE = "Tool call failure"


def is_failure(outcome: CodeOutcome) -> bool:
    return not isinstance(outcome, CodeOk)


def contains_error(outcome: CodeOutcome | None, text: str, result_format: ResultFormat = "default") -> bool:
    """The release's criterion for a failed call: "error" in the result, in any case.

    For a malformed call `outcome` equals None. The release's texts for timeouts and malformed calls
    lack the word, so they count as successes; the default's texts contain it, and are excluded
    here.
    """
    if "error" not in text.lower():
        return False
    return result_format == "rstar2_release" or not (outcome is None or isinstance(outcome, CodeTimedOut))


def format_result(outcome: CodeOutcome, limit: int, result_format: ResultFormat = "default", code: str = "") -> str:
    """Success or failure, the reason, stdout, stderr. `code` is the code that ran, if known.

    Beyond `limit` characters the default cuts the middle of each part; the release that of the
    whole text (policies.dialogue.tool_results_release). The text contains no measured time, so
    that a replay produces the same.
    """
    if result_format == "rstar2_release":
        return format_release_result(outcome, limit, code)
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


def format_malformed_call(error: str, limit: int, result_format: ResultFormat = "default") -> str:
    """The result of a policies.dialogue.parse_turn.MalformedCall."""
    if result_format == "rstar2_release":
        return format_release_malformed_call(error, limit)
    return _format_failure(error, Output(), limit)


def format_call_not_run(reason: str, limit: int, result_format: ResultFormat = "default") -> str:
    """The result of a valid call beyond the maximum of a turn."""
    if result_format == "rstar2_release":
        return format_release_call_not_run(reason, limit)
    return _format_failure(reason, Output(), limit)


def _format_failure(reason: str, output: Output, limit: int) -> str:
    return "\n".join([FAILURE, truncate_middle(reason.rstrip("\n"), limit), *_format_streams(output, limit)])


def _format_streams(output: Output, limit: int) -> list[str]:
    streams = (("stdout", output.stdout, output.stdout_cut), ("stderr", output.stderr, output.stderr_cut))
    return [
        f"{name}:\n{truncate_middle(text.rstrip(chr(10)), limit, dropped)}" for name, text, dropped in streams if text
    ]


def truncate_middle(text: str, limit: int, dropped: int = 0) -> str:
    """`text` with its middle beyond `limit`, and `dropped` bytes at its end, cut with a note."""
    if len(text) <= limit and not dropped:
        return text
    head, tail = text[: (limit + 1) // 2], text[len(text) - limit // 2 :] if limit > 1 else ""
    if len(text) <= limit:
        return f"{text}\n... {dropped} bytes cut ..."
    return f"{head}\n... {len(text) - limit + dropped} characters cut ...\n{tail}"

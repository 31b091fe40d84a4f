"""The one place where a call's outcome becomes the text that the model reads."""

from __future__ import annotations

from typing import Literal, assert_never

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
from policies.release_text import release_malformed_text, release_not_run_text, release_text

ResultFormat = Literal["default", "rstar2_release"]

SUCCESS = "Tool call success"
FAILURE = "Tool call failure"


def failed(outcome: CodeOutcome) -> bool:
    return not isinstance(outcome, CodeOk)


def says_error(outcome: CodeOutcome | None, text: str, result_format: ResultFormat = "default") -> bool:
    """What the release takes for a failed call: a result with the word "error" in any case. None: it did not parse.

    Its own texts for a time-out and for a call that does not parse lack the word, so that these pass as successes
    there; the default's texts have it, and count as if they had not.
    """
    if "error" not in text.lower():
        return False
    return result_format == "rstar2_release" or not (outcome is None or isinstance(outcome, CodeTimedOut))


def result_text(outcome: CodeOutcome, limit: int, result_format: ResultFormat = "default", code: str = "") -> str:
    """Success or failure, the reason, stdout, stderr. `code` is what was run, where it is known.

    The default cuts each part in its middle beyond `limit` characters, the release the whole (policies.release_text).
    Nothing in it depends on the clock, so that a replay reads the same.
    """
    if result_format == "rstar2_release":
        return release_text(outcome, limit, code)
    match outcome:
        case CodeOk(output=output):
            return "\n".join([SUCCESS, *_streams(output, limit)])
        case CodeRaised(output=output, traceback=reason):
            return _failure(reason, output, limit)
        case CodeTimedOut(output=output, limit_s=limit_s):
            return _failure(f"TimeoutError: no result within {limit_s:g} s", output, limit)
        case CodeOutOfMemory(output=output, limit_mib=limit_mib):
            return _failure(f"MemoryError: more than {limit_mib} MiB", output, limit)
        case CodeDied(output=output, exit_code=exit_code):
            return _failure(f"the process ended with exit code {exit_code}", output, limit)
        case CodeRefused(reason=reason):
            return _failure(reason, Output(), limit)
        case _:
            assert_never(outcome)


def malformed_text(error: str, limit: int, result_format: ResultFormat = "default") -> str:
    """What the model reads in place of a result where its call cannot be run: policies.dialogue.MalformedCall."""
    if result_format == "rstar2_release":
        return release_malformed_text(error, limit)
    return _failure(error, Output(), limit)


def not_run_text(reason: str, limit: int, result_format: ResultFormat = "default") -> str:
    """The same for a call that could be run, but is one too many."""
    if result_format == "rstar2_release":
        return release_not_run_text(reason, limit)
    return _failure(reason, Output(), limit)


def _failure(reason: str, output: Output, limit: int) -> str:
    return "\n".join([FAILURE, cut(reason.rstrip("\n"), limit), *_streams(output, limit)])


def _streams(output: Output, limit: int) -> list[str]:
    streams = (("stdout", output.stdout, output.stdout_cut), ("stderr", output.stderr, output.stderr_cut))
    return [f"{name}:\n{cut(text.rstrip(chr(10)), limit, dropped)}" for name, text, dropped in streams if text]


def cut(text: str, limit: int, dropped: int = 0) -> str:
    """`text`, its middle replaced by a note if it is longer than `limit` or `dropped` bytes are missing at its end."""
    if len(text) <= limit and not dropped:
        return text
    head, tail = text[: (limit + 1) // 2], text[len(text) - limit // 2 :] if limit > 1 else ""
    if len(text) <= limit:
        return f"{text}\n... {dropped} bytes cut ..."
    return f"{head}\n... {len(text) - limit + dropped} characters cut ...\n{tail}"

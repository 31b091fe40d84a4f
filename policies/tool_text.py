"""The one place where a call's outcome becomes the text that the model reads."""

from __future__ import annotations

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

SUCCESS = "Tool call success"
FAILURE = "Tool call failure"


def failed(outcome: CodeOutcome) -> bool:
    return not isinstance(outcome, CodeOk)


def says_error(outcome: CodeOutcome, text: str) -> bool:
    """What the release takes for a failed call: a result with the word "error" in any case.

    Its texts for a time-out and for a call that does not parse lack the word, so that these pass as successes there.
    """
    return "error" in text.lower() and not isinstance(outcome, CodeTimedOut)


def result_text(outcome: CodeOutcome, limit: int) -> str:
    """Success or failure, the reason, stdout, stderr. Each is cut in its middle beyond `limit` characters.

    Nothing in it depends on the clock, so that a replay reads the same.
    """
    match outcome:
        case CodeOk(output=output):
            return "\n".join([SUCCESS, *_streams(output, limit)])
        case CodeRaised(output=output, traceback=reason):
            return _failure(reason, output, limit)
        case CodeTimedOut(output=output, limit_s=limit_s):
            return _failure(f"TimeoutError: no result within {limit_s:g} s", output, limit)
        case CodeOutOfMemory(output=output, limit_mib=limit_mib):
            return _failure(f"MemoryError: more than {limit_mib} MiB", output, limit)
        case CodeDied(output=output, exit_code=code):
            return _failure(f"the process ended with exit code {code}", output, limit)
        case CodeRefused(reason=reason):
            return _failure(reason, Output(), limit)
        case _:
            assert_never(outcome)


def malformed_text(error: str, limit: int) -> str:
    return _failure(error, Output(), limit)


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

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
from policies.tool_text import FAILURE, SUCCESS, cut, failed, result_text

TRACEBACK = (
    "Traceback (most recent call last):\n  File \"<cell>\", line 1, in <module>\nNameError: name 'x' is not defined"
)


@pytest.mark.parametrize(
    ("outcome", "text"),
    [
        (CodeOk(Output("58\n")), f"{SUCCESS}\nstdout:\n58"),
        (CodeOk(Output()), SUCCESS),
        (CodeOk(Output("a\n", "b\n")), f"{SUCCESS}\nstdout:\na\nstderr:\nb"),
        (CodeRaised(Output("1\n"), "NameError", TRACEBACK), f"{FAILURE}\n{TRACEBACK}\nstdout:\n1"),
        (CodeTimedOut(Output(), 4.0), f"{FAILURE}\nTimeoutError: no result within 4 s"),
        (CodeOutOfMemory(Output(), 512), f"{FAILURE}\nMemoryError: more than 512 MiB"),
        (CodeDied(Output(), -11), f"{FAILURE}\nthe process ended with exit code -11"),
        (CodeRefused("too long"), f"{FAILURE}\ntoo long"),
        (CodeOk(Output("ab", "", 5)), f"{SUCCESS}\nstdout:\nab\n... 5 bytes cut ..."),
    ],
)
def test_a_result_says_success_or_failure_the_reason_and_the_streams(outcome: CodeOutcome, text: str) -> None:
    assert result_text(outcome, 500) == text
    assert failed(outcome) == text.startswith(FAILURE)


@given(st.text(max_size=300), st.integers(min_value=1, max_value=100))
def test_a_cut_text_keeps_its_two_ends_and_says_how_much_is_gone(text: str, limit: int) -> None:
    shown = cut(text, limit)
    if len(text) <= limit:
        assert shown == text
    else:
        head, _, rest = shown.partition("\n... ")
        number, _, tail = rest.partition(" characters cut ...\n")
        assert shown.startswith(text[: (limit + 1) // 2])
        assert len(text) - limit == int(number) if "\n... " not in head else True
        assert text.endswith(tail)

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asterism.bus import messages as msg
from asterism.policies.dialogue.parse_turn import MalformedCall
from asterism.policies.dialogue.tool_results import (
    FAILURE,
    SUCCESS,
    ResultFormat,
    contains_error,
    format_call_not_run,
    format_malformed_call,
    format_result,
    is_failure,
    truncate_middle,
)

TRACEBACK = (
    "Traceback (most recent call last):\n  File \"<cell>\", line 1, in <module>\nNameError: name 'x' is not defined"
)


@pytest.mark.parametrize(
    ("outcome", "text"),
    [
        (msg.CodeOk(msg.Output("58\n")), f"{SUCCESS}\nstdout:\n58"),
        (msg.CodeOk(msg.Output()), SUCCESS),
        (msg.CodeOk(msg.Output("a\n", "b\n")), f"{SUCCESS}\nstdout:\na\nstderr:\nb"),
        (msg.CodeRaised(msg.Output("1\n"), "NameError", TRACEBACK), f"{FAILURE}\n{TRACEBACK}\nstdout:\n1"),
        (msg.CodeTimedOut(msg.Output(), 4.0), f"{FAILURE}\nTimeoutError: no result within 4 s"),
        (msg.CodeOutOfMemory(msg.Output(), 512), f"{FAILURE}\nMemoryError: more than 512 MiB"),
        (msg.CodeCrashed(msg.Output(), -11), f"{FAILURE}\nthe process ended with exit code -11"),
        (msg.CodeRefused("too long"), f"{FAILURE}\ntoo long"),
        (msg.CodeOk(msg.Output("ab", "", 5)), f"{SUCCESS}\nstdout:\nab\n... 5 bytes cut ..."),
    ],
)
def test_a_result_contains_the_status_the_reason_and_the_streams(outcome: msg.CodeOutcome, text: str) -> None:
    assert format_result(outcome, 500) == text
    assert is_failure(outcome) == text.startswith(FAILURE)


@given(st.text(max_size=300), st.integers(min_value=1, max_value=100))
def test_a_truncated_text_has_both_ends_and_the_number_of_cut_characters(text: str, limit: int) -> None:
    shown = truncate_middle(text, limit)
    if len(text) <= limit:
        assert shown == text
    else:
        head, _, rest = shown.partition("\n... ")
        number, _, tail = rest.partition(" characters cut ...\n")
        assert shown.startswith(text[: (limit + 1) // 2])
        assert len(text) - limit == int(number) if "\n... " not in head else True
        assert text.endswith(tail)


RELEASE: ResultFormat = "rstar2_release"
CODE = "y = 1\nprint(x)"
DEEP = (
    "Traceback (most recent call last):\n"
    '  File "<cell>", line 2, in <module>\n'
    '  File "json/decoder.py", line 355, in raw_decode\n'
    "json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)"
)
DOES_NOT_COMPILE = "  File \"<cell>\", line 2\nSyntaxError: '(' was never closed"


@pytest.mark.parametrize(
    ("outcome", "text"),
    [
        (msg.CodeOk(msg.Output("58\n")), "Tool call success\nstdout: 58\n"),
        (msg.CodeOk(msg.Output()), "Tool call success"),
        (msg.CodeOk(msg.Output("a", "b\n")), "Tool call success\nstdout: a\nstderr: b\n"),
        (
            msg.CodeRaised(msg.Output("1\n", "careful\n"), "NameError: name 'x' is not defined", TRACEBACK),
            "Tool call failure\nreason: \nstdout: 1\n\n"
            "stderr: careful\nNameError at line 1: name 'x' is not defined\n  y = 1\n",
        ),
        (
            msg.CodeRaised(
                msg.Output(), "json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)", DEEP
            ),
            "Tool call failure\nreason: \nstderr: JSONDecodeError at line 355: Expecting value: line 1 column 1 (char 0)\n",
        ),
        (
            msg.CodeRaised(msg.Output(), "SyntaxError: '(' was never closed", DOES_NOT_COMPILE),
            "Tool call failure\nreason: \n"
            "stderr: SyntaxError at line 2: '(' was never closed (<unknown>, line 2)\n  print(x)\n",
        ),
        (msg.CodeRaised(msg.Output(), "KeyError", ""), "Tool call failure\nreason: \nstderr: KeyError: \n"),
        (msg.CodeTimedOut(msg.Output("1\n"), 4.0), "Tool call failure\nreason: worker_timeout\nstdout: 1\n"),
        (msg.CodeOutOfMemory(msg.Output(), 512), "Tool call failure\nreason: \nstderr: MemoryError: \n"),
        (msg.CodeCrashed(msg.Output("", "gone"), -11), "Tool call failure\nreason: \nstderr: gone"),
        (msg.CodeCrashed(msg.Output("bye"), 0), "Tool call success\nstdout: bye"),
        (msg.CodeRefused("too long"), "Error when executing tool: too long"),
    ],
)
def test_the_release_format_matches_the_release(outcome: msg.CodeOutcome, text: str) -> None:
    assert format_result(outcome, 500, RELEASE, CODE) == text


def test_the_release_cuts_each_stream_at_1000_characters_and_then_in_the_middle() -> None:
    shown = format_result(msg.CodeOk(msg.Output("a" * 999 + "b" * 999)), 256, RELEASE)
    assert shown == "Tool call success\nstdout: " + "a" * 102 + "...(truncated)..." + "a" * 127 + "b"
    assert format_result(msg.CodeOk(msg.Output("a" * 230)), 256, RELEASE) == "Tool call success\nstdout: " + "a" * 230


@pytest.mark.parametrize(
    ("call", "default", "release"),
    [
        (
            MalformedCall("JSONDecodeError: Expecting value: line 1 column 1 (char 0)", is_decoded=False),
            f"{FAILURE}\nJSONDecodeError: Expecting value: line 1 column 1 (char 0)",
            "Failed to decode tool call: Expecting value: line 1 column 1 (char 0)",
        ),
        (
            MalformedCall('unknown function "f"'),
            f'{FAILURE}\nunknown function "f"',
            'Error when executing tool: unknown function "f"',
        ),
    ],
)
def test_malformed_calls_have_a_result_in_both_formats(call: MalformedCall, default: str, release: str) -> None:
    assert format_malformed_call(call, 500) == default
    assert format_malformed_call(call, 500, RELEASE) == release


def test_surplus_calls_have_a_result_in_both_formats() -> None:
    assert format_call_not_run("not run", 500) == f"{FAILURE}\nnot run"
    assert format_call_not_run("not run", 500, RELEASE) == "Tool call failure\nreason: not run"


@pytest.mark.parametrize(
    ("outcome", "default", "release"),
    [
        (msg.CodeOk(msg.Output("58")), False, False),
        (msg.CodeOk(msg.Output("relative error 0.1")), True, True),
        (msg.CodeRaised(msg.Output(), "NameError: name 'x' is not defined", TRACEBACK), True, True),
        (msg.CodeRaised(msg.Output(), "StopIteration", "Traceback\nStopIteration"), False, False),
        (msg.CodeTimedOut(msg.Output(), 4.0), False, False),
        (msg.CodeTimedOut(msg.Output("error"), 4.0), False, True),
        (msg.CodeOutOfMemory(msg.Output(), 512), True, True),
        (msg.CodeCrashed(msg.Output(), -11), False, False),
        (msg.CodeRefused("too long"), False, True),
    ],
)
def test_results_contain_the_word_error_as_in_the_release(
    outcome: msg.CodeOutcome, default: bool, release: bool
) -> None:
    assert contains_error(outcome, format_result(outcome, 500)) == default
    assert contains_error(outcome, format_result(outcome, 500, RELEASE), RELEASE) == release


def test_a_call_that_cannot_be_decoded_is_no_error_in_either_format() -> None:
    call = MalformedCall("JSONDecodeError: Expecting value", is_decoded=False)
    assert not contains_error(None, format_malformed_call(call, 500))
    assert not contains_error(None, format_malformed_call(call, 500, RELEASE), RELEASE)
    assert contains_error(None, format_malformed_call(MalformedCall("unknown function"), 500, RELEASE), RELEASE)

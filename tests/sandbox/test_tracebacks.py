"""The traceback that the model reads: the same on every machine and version."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

from sandbox.inside import program
from sandbox.inside.tracebacks import TEXT_LIMIT


def raised(code: str, run: Callable[[str, ModuleType], list[str]] = program.run_cell) -> tuple[str, str]:
    main = ModuleType("__main__")
    outcome = run(code, main)
    assert outcome[0] == "raised", outcome
    return outcome[1], outcome[2]


def test_one_line_gives_three_lines() -> None:
    error, traceback = raised("print(gcd(12, 18))")
    assert error == "NameError: name 'gcd' is not defined"
    assert traceback == (
        'Traceback (most recent call last):\n  File "<cell>", line 1, in <module>\n'
        "NameError: name 'gcd' is not defined"
    )


def test_the_last_expression_has_its_own_line() -> None:
    assert '  File "<cell>", line 2, in <module>' in raised("x = 0\n1 / x")[1]


def test_code_that_does_not_compile_has_no_frames() -> None:
    assert raised("print((") == (
        "SyntaxError: '(' was never closed",
        "  File \"<cell>\", line 1\nSyntaxError: '(' was never closed",
    )


def test_a_librarys_file_is_named_from_its_import_folder_on_and_its_error_with_its_module() -> None:
    error, traceback = raised("import json\njson.loads('{')")
    assert error.startswith("json.decoder.JSONDecodeError: Expecting property name")
    assert '  File "json/decoder.py", line' in traceback


def test_a_frame_that_repeats_is_counted() -> None:
    code = "def f(n):\n    return f(n - 1) if n else 1 / 0\nf(9)"
    lines = raised(code)[1].splitlines()
    assert lines[2:6] == ['  File "<cell>", line 2, in f'] * 3 + ["  [Previous line repeated 7 more times]"]
    assert lines[6:] == ["ZeroDivisionError: division by zero"]


def test_a_chain_is_told_in_order() -> None:
    traceback = raised("try:\n    1 / 0\nexcept Exception:\n    raise KeyError('x')")[1]
    first, second = traceback.split("\n\nDuring handling of the above exception, another exception occurred:\n\n")
    assert first.endswith("ZeroDivisionError: division by zero")
    assert second.endswith("KeyError: 'x'")


def test_an_exception_that_cannot_be_told_is_still_an_outcome() -> None:
    code = "class E(Exception):\n    def __str__(self): raise ValueError\nraise E"
    assert raised(code)[0] == "E: <exception str() failed>"


def test_a_long_message_loses_its_middle() -> None:
    error, traceback = raised("raise ValueError('x' * 1_000_000)")
    assert len(error) < TEXT_LIMIT + 100
    assert len(traceback) < TEXT_LIMIT + 100

"""Formats the traceback for the model, in the process of the model's code.

The text is the same on every machine and Python version: no source lines, no `^^^^` markers, no
cell numbers, no "Did you mean". The cell `print(gcd(12, 18))` gives exactly this text, without a
newline at its end:

    Traceback (most recent call last):
      File "<cell>", line 1, in <module>
    NameError: name 'gcd' is not defined

Code that does not compile gives a text without the first line:

      File "<cell>", line 1
    SyntaxError: '(' was never closed

The file is "<cell>" for `jupyter_code` and "<program>" for `python_code_with_standard_io`. Frames
of the harness are omitted. A library's file is relative to its import folder ("json/decoder.py").
Repetitions of a frame beyond three are counted. Causes and contexts come first, as in Python.
"""

import sys
from types import TracebackType

MAX_CHARACTERS = 16_384  # fits into a socket's buffer; the middle of a longer text is cut
_MAX_REPEATS = 3
_MAX_CHAIN = 8  # causes and contexts that are shown
_CAUSE = "\nThe above exception was the direct cause of the following exception:\n\n"
_CONTEXT = "\nDuring handling of the above exception, another exception occurred:\n\n"


def format_error_line(error: BaseException) -> str:
    """Return "NameError: name 'x' is not defined", with the module's name if a library defines the exception."""
    kind = type(error)
    name = (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )
    name = _escape_name(name)
    try:
        message = str(error.msg if isinstance(error, SyntaxError) else error)
    except BaseException:
        message = "<exception str() failed>"
    return _truncate(f"{name}: {message}" if message else name)


def format_traceback(error: BaseException, harness_file: str) -> str:
    """Return Python's output for `error`, in the format of this module's docstring."""
    return _truncate(_format_chain(error, harness_file, _MAX_CHAIN))


def _format_chain(error: BaseException, harness_file: str, remaining: int) -> str:
    before = ""
    if remaining and error.__cause__ is not None:
        before = _format_chain(error.__cause__, harness_file, remaining - 1) + "\n" + _CAUSE
    elif remaining and error.__context__ is not None and not error.__suppress_context__:
        before = _format_chain(error.__context__, harness_file, remaining - 1) + "\n" + _CONTEXT
    return before + _format_exception(error, harness_file)


def _format_exception(error: BaseException, harness_file: str) -> str:
    lines = _format_frames(error.__traceback__, harness_file)
    if lines:
        lines.insert(0, "Traceback (most recent call last):")
    if isinstance(error, SyntaxError) and error.filename:
        lines.append(f'  File "{_shorten_path(str(error.filename))}", line {error.lineno}')
    lines.append(format_error_line(error))
    return "\n".join(lines)


def _format_frames(entry: TracebackType | None, harness_file: str) -> list[str]:
    lines: list[str] = []
    repeats = 0
    while entry is not None:
        code = entry.tb_frame.f_code
        line = f'  File "{_shorten_path(code.co_filename)}", line {entry.tb_lineno}, in {_escape_name(code.co_name)}'
        entry = entry.tb_next
        if code.co_filename == harness_file:
            continue
        repeats = repeats + 1 if lines and line == lines[-1 if repeats < _MAX_REPEATS else -2] else 0
        if repeats < _MAX_REPEATS:
            lines.append(line)
        elif repeats == _MAX_REPEATS:
            lines.append("")
        if repeats >= _MAX_REPEATS:
            more = repeats - _MAX_REPEATS + 1
            lines[-1] = f"  [Previous line repeated {more} more time{'s' if more > 1 else ''}]"
    return lines


def _shorten_path(filename: str) -> str:
    for folder in sorted(sys.path, key=len, reverse=True):
        if folder and filename.startswith(folder + "/"):
            return _escape_name(filename[len(folder) + 1 :])
    return _escape_name(filename)


def _escape_name(name: str) -> str:
    """Escape a name that code chose: line breaks in it could imitate lines of the traceback."""
    return name if name.isprintable() else repr(name)[1:-1]


def _truncate(text: str) -> str:
    dropped = max(0, len(text) - 2 * MAX_CHARACTERS)
    if dropped:  # first, because the next steps copy the text
        text = text[:MAX_CHARACTERS] + text[-MAX_CHARACTERS:]
    # UTF-8 cannot encode lone surrogates, and NUL separates the parts of an outcome.
    text = text.encode("utf-8", "backslashreplace").decode("utf-8").replace("\0", "\\x00")
    if len(text) <= MAX_CHARACTERS:
        return text
    half = MAX_CHARACTERS // 2
    return f"{text[:half]}\n[... {len(text) + dropped - 2 * half} characters ...]\n{text[-half:]}"

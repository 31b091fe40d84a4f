"""The traceback that the model reads. Standard library only: it runs beside the model's code.

The same text on every machine and Python version: no source lines, no `^^^^` markers, no numbers of cells, no
"Did you mean". The cell `print(gcd(12, 18))` gives exactly, without a newline at its end,

    Traceback (most recent call last):
      File "<cell>", line 1, in <module>
    NameError: name 'gcd' is not defined

and code that does not compile gives, without the first line,

      File "<cell>", line 1
    SyntaxError: '(' was never closed

The file is "<cell>" for `jupyter_code` and "<program>" for `python_code_with_standard_io`. Frames of the harness are
left out; a library's file is named from its import folder on ("json/decoder.py"). A frame that repeats more than three
times is counted. Causes and contexts come first, as Python prints them.
"""

import sys
from types import TracebackType

TEXT_LIMIT = 16_384  # characters; the middle is dropped beyond it, so that the text fits into a socket's buffer
_REPEATS = 3
_CHAIN = 8  # exceptions of a chain that are shown
_CAUSE = "\nThe above exception was the direct cause of the following exception:\n\n"
_CONTEXT = "\nDuring handling of the above exception, another exception occurred:\n\n"


def error_line(error: BaseException) -> str:
    """ "NameError: name 'x' is not defined"; the module is named unless it is builtins or the code itself."""
    kind = type(error)
    name = (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )
    try:
        message = str(error.msg if isinstance(error, SyntaxError) else error)
    except BaseException:
        message = "<exception str() failed>"
    return _cut(f"{name}: {message}" if message else name)


def traceback_text(error: BaseException, harness_file: str) -> str:
    """All that Python would print of `error`, in the form that this module's docstring states."""
    return _cut(_chain(error, harness_file, _CHAIN))


def _chain(error: BaseException, harness_file: str, left: int) -> str:
    before = ""
    if left and error.__cause__ is not None:
        before = _chain(error.__cause__, harness_file, left - 1) + "\n" + _CAUSE
    elif left and error.__context__ is not None and not error.__suppress_context__:
        before = _chain(error.__context__, harness_file, left - 1) + "\n" + _CONTEXT
    return before + _one(error, harness_file)


def _one(error: BaseException, harness_file: str) -> str:
    lines = _frame_lines(error.__traceback__, harness_file)
    if lines:
        lines.insert(0, "Traceback (most recent call last):")
    if isinstance(error, SyntaxError) and error.filename:
        lines.append(f'  File "{_short(str(error.filename))}", line {error.lineno}')
    lines.append(error_line(error))
    return "\n".join(lines)


def _frame_lines(entry: TracebackType | None, harness_file: str) -> list[str]:
    lines: list[str] = []
    repeats = 0
    while entry is not None:
        code = entry.tb_frame.f_code
        line = f'  File "{_short(code.co_filename)}", line {entry.tb_lineno}, in {code.co_name}'
        entry = entry.tb_next
        if code.co_filename == harness_file:
            continue
        repeats = repeats + 1 if lines and line == lines[-1 if repeats < _REPEATS else -2] else 0
        if repeats < _REPEATS:
            lines.append(line)
        elif repeats == _REPEATS:
            lines.append("")
        if repeats >= _REPEATS:
            more = repeats - _REPEATS + 1
            lines[-1] = f"  [Previous line repeated {more} more time{'s' if more > 1 else ''}]"
    return lines


def _short(filename: str) -> str:
    for folder in sorted(sys.path, key=len, reverse=True):
        if folder and filename.startswith(folder + "/"):
            return filename[len(folder) + 1 :]
    return filename


def _cut(text: str) -> str:
    dropped = max(0, len(text) - 2 * TEXT_LIMIT)
    if dropped:  # first, because what follows copies the text
        text = text[:TEXT_LIMIT] + text[-TEXT_LIMIT:]
    # A lone surrogate must not stop the message, and NUL separates its parts.
    text = text.encode("utf-8", "backslashreplace").decode("utf-8").replace("\0", "\\x00")
    if len(text) <= TEXT_LIMIT:
        return text
    half = TEXT_LIMIT // 2
    return f"{text[:half]}\n[... {len(text) + dropped - 2 * half} characters ...]\n{text[-half:]}"

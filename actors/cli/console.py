"""Every command prints through this console, which escapes control and invisible characters. If its reader closes the
output, the command ends without a traceback. `--json FILE` writes the complete result for other programs.

Programs, the model and data files can contain sequences that set the terminal's title or clipboard,
overwrite lines or reverse the order of text.
"""

import errno
import logging
import os
import re
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderableType, RenderHook, RenderResult
from rich.segment import Segment
from rich.table import Table

from asterism.configs.atomic_write import check_writable
from asterism.configs.errors import UnusableInput

EXIT_OUTPUT_FAILED = 1
# These are C0 and C1 without tab and line feed, line and paragraph separators, surrogates, which UTF-8 cannot encode,
# and characters that a terminal does not show (Default_Ignorable_Code_Point of Unicode 17, with bidirectional controls,
# tags and interlinear annotations). The two variation selectors of ordinary emoji are not in it.
_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e"
    "\u2060-\u206f\u3164\ud800-\udfff\ufe00-\ufe0d\ufeff\uffa0\ufff0-\ufffb"
    "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)


def escape_controls(text: str) -> str:
    r"""Replace each control and invisible character as in Python's source: `\x1b`, `\r`, `\u202e`, `\U000e0041`."""
    return _CONTROL.sub(lambda found: _escape(ord(found[0])), text)


def _escape(code: int) -> str:
    if code == ord("\r"):
        return r"\r"
    return f"\\x{code:02x}" if code < 1 << 8 else f"\\u{code:04x}" if code < 1 << 16 else f"\\U{code:08x}"


class _EscapingRenderHook(RenderHook):
    """A hook through which rich passes every printed object; rich's own codes are styles or control segments."""

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [_Escaped(each) for each in renderables]


class _Escaped:
    def __init__(self, renderable: RenderableType) -> None:
        self._renderable = renderable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self._renderable, options):
            yield segment if segment.control else Segment(escape_controls(segment.text), segment.style)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Raise BrokenPipeError again for ending_without_output; rich's own method would exit, on any thread."""
        raise


def make_console(*, stderr: bool = False) -> Console:
    """Return a console that prints texts and paths verbatim, except for control characters.

    No emoji replaces `:100:` in `x[:100:2]`.
    """
    console = _Console(emoji=False, stderr=stderr)
    console.push_render_hook(_EscapingRenderHook())
    return console


def print_line(console: Console, text: str, *, markup: bool = False) -> None:
    console.print(text, markup=markup, highlight=False, soft_wrap=True)


def make_table(*titles: str, pad_edge: bool = False) -> Table:
    """Return an empty table. A title that begins with ">" names a column of numbers, aligned to the right."""
    table = Table(box=SIMPLE_HEAD, pad_edge=pad_edge)
    for title in titles:
        table.add_column(title.removeprefix(">"), justify="right" if title.startswith(">") else "left")
    return table


def hide_library_warnings() -> None:
    """Hide matplotlib's warning that it caches fonts in a temporary folder because HOME is not writable."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)


@contextmanager
def ending_without_output() -> Generator[None]:
    """End the command if its output has no reader or its disk is full; other errors pass."""
    sys.stdout = sys.stdout or Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - open until the end
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.filename is not None or error.errno not in (errno.EPIPE, errno.ENOSPC, errno.EIO):
            raise
        # The interpreter flushes the rest of the output when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno != errno.EPIPE:
            make_console(stderr=True).print(f"[bold red]error:[/] standard output: {error.strerror}", highlight=False)
        sys.exit(EXIT_OUTPUT_FAILED)


def check_json_path(file: Path | None) -> None:
    """Check that the file can be written. Raises UnusableInput before the work starts."""
    if file is None:
        return
    if file.is_dir():
        raise UnusableInput(f"--json {file}: is a folder; name a file")
    if not file.parent.is_dir():
        raise UnusableInput(f"--json {file}: the folder {file.parent} does not exist")


def check_outputs(
    outputs: list[Path], inputs: list[Path], extensions: tuple[str, ...] = (".jsonl", ".jsonl.gz"), *, overwrite: bool
) -> None:
    """Check that the outputs can be written. Raises UnusableInput before the work starts."""
    for path in outputs:
        if not path.name.endswith(extensions):
            raise UnusableInput(f"--output {path}: expected the extension {' or '.join(extensions)}")
        if any(path.resolve() == each.resolve() for each in inputs):
            raise UnusableInput(f"--output {path}: is also an input")
        if any(path.resolve().parent == each.resolve() for each in inputs):  # the output would join the input
            raise UnusableInput(f"--output {path}: is in the folder {path.parent}, which is an input")
        if not path.parent.is_dir():
            raise UnusableInput(f"--output {path}: the folder {path.parent} does not exist")
        if path.exists() and not overwrite:
            raise UnusableInput(f"--output: {path} exists; add --overwrite to replace it")
        check_writable(path)


def write_json(file: Path | None, result: msgspec.Struct | Sequence[msgspec.Struct]) -> None:
    """Write the result as JSON. Raises UnusableInput."""
    if file is None:
        return
    try:
        file.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")
    except OSError as error:
        raise UnusableInput(f"--json {file}: {error.strerror}") from error

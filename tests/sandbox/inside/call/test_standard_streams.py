"""Programs and cells use the standard streams as in an ordinary interpreter; no cell ends the output of later cells."""

import asyncio
import json
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

import pytest

from asterism.bus.messages import CodeOk, CodeRaised, Output
from tests.sandbox.conftest import Client

pytestmark = [pytest.mark.slow, pytest.mark.real_clock]
_LINES = Path(__file__).with_name("bug_reports.jsonl").read_text(encoding="utf-8").splitlines()
REPORTS = {report["id"]: report["input"] for report in map(json.loads, _LINES)}

# Programs whose output must equal that of an ordinary interpreter with pipes.
PROGRAMS = {
    "reconfigure": REPORTS["stdout-01"]["code"],
    "a wrapper of the buffer": REPORTS["stdout-03"]["code"],
    "a wrapper of the errors' buffer": (
        "import io, sys\nsys.stderr = io.TextIOWrapper(sys.stderr.buffer, 'utf-8')\nprint('é', file=sys.stderr)"
    ),
    "reconfigure of the errors": "import sys\nsys.stderr.reconfigure(encoding='utf-8')\nprint('é', file=sys.stderr)",
    "reconfigure of everything": (
        "import sys\nsys.stdout.reconfigure(encoding='latin-1', errors='replace', newline='\\r\\n', line_buffering=False,"
        " write_through=True)\nprint('\u0394a')"
    ),
    "a writer of codecs": "import codecs, sys\nsys.stdout = codecs.getwriter('utf-8')(sys.stdout.buffer)\nprint('é')",
    "a detached buffer": (
        "import codecs, sys\nsys.stdout = codecs.getwriter('utf-8')(sys.stdout.detach())\nprint('é')\nsys.stdout.flush()"
    ),
    "a file of the descriptor": "import os, sys\nsys.stdout = os.fdopen(sys.stdout.fileno(), 'w', closefd=False)\nprint('é')",
    "an unbuffered file": "import sys\nsys.stdout = open(1, 'wb', buffering=0, closefd=False)\nn = sys.stdout.write(b'a')",
    "bytes and text": "import sys\nsys.stdout.buffer.write(b'a\\n')\nsys.stdout.flush()\nprint('b')",
    "properties": (
        "import sys\nfor s in (sys.stdout, sys.stderr):\n    print(s.encoding, s.mode, s.name, s.fileno(), s.seekable(),"
        " s.writable(), s.readable(), s.isatty(), s.newlines, s is sys.__stdout__ or s is sys.__stderr__)"
    ),
    "tell": "import sys\ntry: sys.stdout.tell()\nexcept OSError as error: print(error)",
    "redirection": (
        "import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()) as out: print('a')\nprint(out.getvalue())"
    ),
    "a wrapper of the input": "import io, sys\nsys.stdin = io.TextIOWrapper(sys.stdin.buffer, 'utf-8')\nprint(input())",
    "reconfigure of the input": "import sys\nsys.stdin.reconfigure(encoding='utf-8')\nprint(sys.stdin.read())",
    "lines of the input": "import sys\nprint([line for line in sys.stdin], sys.stdin.read())",
    "bytes of the input": "import sys\nprint(sys.stdin.buffer.read())",
    "a file of the input": "print(open(0).read().split())",
    "a reader of codecs": "import codecs, sys\nprint(codecs.getreader('utf-8')(sys.stdin.buffer).read())",
    "all three": (
        "import io, sys\nsys.stdin = io.TextIOWrapper(sys.stdin.buffer, 'utf-8')\nsys.stdout = io.TextIOWrapper("
        "sys.stdout.buffer, 'utf-8')\nsys.stderr = io.TextIOWrapper(sys.stderr.buffer, 'utf-8')\nprint(input())"
    ),
}
INPUT = "first é\nsecond\n"


async def run_usually(code: str) -> Output:
    """Return the output of the code in an ordinary interpreter with pipes."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-X", "utf8", "-c", code, stdin=PIPE, stdout=PIPE, stderr=PIPE
    )
    texts = await process.communicate(INPUT.encode())
    assert process.returncode == 0, (code, texts)
    stdout, stderr = (text.decode("utf-8", "replace") for text in texts)
    return Output(stdout, stderr)


async def test_a_program_has_the_output_of_an_ordinary_interpreter(client: Client) -> None:
    for name, code in PROGRAMS.items():
        assert (await client.program(code, INPUT)).outcome == CodeOk(await run_usually(code)), name


async def test_cells_use_the_streams_like_programs_and_later_cells_still_print(client: Client) -> None:
    for trajectory, (name, code) in enumerate(PROGRAMS.items()):
        if "input()" in code or "stdin" in code or "open(0)" in code:  # the input of cells is empty
            continue
        if "newline=" in code:  # later cells keep the configuration of an earlier cell
            continue
        usual = await run_usually(code)
        for _ in range(2):
            assert (await client.cell(code, trajectory)).outcome == CodeOk(usual), name
            assert await client.printed("print('alive')\n1 + 1", trajectory) == "alive\n2\n"
            later = await client.cell("import sys; print('e', file=sys.stderr)", trajectory)
            assert later.outcome == CodeOk(Output("", "e\n")), name


# By name: a cell, and its output, which is None if the cell fails.
BREAKING = {
    "closes the object": (REPORTS["stdout-07"]["cells"][0], ""),
    "closes both objects": ("import sys; sys.stdout.close(); sys.stderr.close()", ""),
    "closes the descriptor in a file": (REPORTS["stdout-08"]["cells"][0], "a\n"),
    "closes the descriptor": ("import os; os.close(1)", ""),
    "closes all descriptors": ("import os; os.closerange(0, 3)", ""),
    "closes the descriptor and prints": ("import os; os.close(1); print('lost')", None),
    "closes the input": ("import sys; sys.stdin.close()", ""),
    "replaces the descriptor by a file": (
        "import os; new = os.open('file', os.O_CREAT | os.O_RDWR); os.dup2(new, 1); print('into the file')",
        "",
    ),
    "replaces the descriptor by /dev/null": ("import os; os.dup2(os.open('/dev/null', os.O_WRONLY), 1); print(1)", ""),
    "opens a file in its place": ("import os; os.close(1); kept = open('other', 'w')", None),
    "deletes a wrapper": ("import io, sys; w = io.TextIOWrapper(sys.stdout.buffer); del w", ""),
    "detaches": ("import sys; buffer = sys.stdout.detach()", None),
    "deletes the objects": ("import sys; del sys.stdout, sys.stderr, sys.__stdout__", ""),
    "has no objects": ("import sys; sys.stdout = sys.stderr = sys.__stdout__ = sys.__stderr__ = None", ""),
    "replaces methods": ("import sys\ndef bad(*_): raise KeyError\nsys.stdout.flush = bad", None),
    "replaces the object": ("import io, sys; sys.stdout = io.StringIO(); print('hidden')", ""),
}


@pytest.mark.parametrize("name", BREAKING)
async def test_a_cell_that_breaks_the_streams_does_not_end_the_output_of_later_cells(name: str, client: Client) -> None:
    code, printed = BREAKING[name]
    for _ in range(3):
        outcome = (await client.cell(code)).outcome
        if printed is not None:
            assert outcome == CodeOk(Output(printed))
        assert await client.printed("x = 1\nprint('alive')\n1 + 1") == "alive\n2\n"
        assert await client.printed("print('alive')") == "alive\n"  # this cell is pure
    failing = (await client.cell("import sys; print('e', file=sys.stderr); input()")).outcome
    assert isinstance(failing, CodeRaised)
    assert (failing.output.stderr, failing.error) == ("e\n", "EOFError: EOF when reading a line")


async def test_a_logger_and_a_wrapper_of_an_earlier_cell_keep_their_streams(client: Client) -> None:
    await client.printed("import io, logging, sys\nlogging.basicConfig(stream=sys.stdout)")
    await client.printed("sys.stdout = out = io.TextIOWrapper(sys.stdout.buffer, line_buffering=True)")
    assert await client.printed("print('a', file=out)\nlogging.warning('b')") == "a\nWARNING:root:b\n"
    await client.printed("sys.stdout = out = io.TextIOWrapper(sys.stdout.buffer, line_buffering=True)")
    assert await client.printed("print('a', file=out)\nlogging.warning('b')\nprint('c')") == "a\nWARNING:root:b\nc\n"


async def test_later_cells_read_an_input_that_a_cell_has_set(client: Client) -> None:
    await client.printed("import io, sys; sys.stdin = io.StringIO('a\\nb')")
    assert await client.printed("input(), input()") == "('a', 'b')\n"


async def test_streams_are_usable_after_a_rollback(client: Client) -> None:
    await client.printed("x = [1]; import os, sys; os.close(1)")
    await client.cell("sys.stdout.close(); os._exit(3)")
    assert await client.printed("print(x)") == "[1]\n"

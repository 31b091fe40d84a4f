"""A hostile program: its name, its code, and what must come of it."""

from __future__ import annotations

import textwrap
from typing import Literal, NamedTuple

from bus.messages import CodeDied, CodeOk, CodeOutcome, CodeOutOfMemory, CodeRaised, CodeTimedOut, Output

Form = Literal["program", "cell"]  # a stateless call, or a cell of a notebook that holds `kept`

# Stand in a code for what the arena knows when it runs.
SECRET_FILE = "@SECRET_FILE@"  # readable by everybody on this machine
NEIGHBOURS = "@NEIGHBOURS@"  # process ids, as this machine numbers them: the neighbour's notebook, servers, the test
NEIGHBOUR_FOLDERS = "@NEIGHBOUR_FOLDERS@"  # paths


class Ending(NamedTuple):
    """What a call may come to. None: anything."""

    kind: type[CodeOutcome]
    stdout: str | None = None  # all of it
    detail: str | int | None = None  # how the error begins, or the exit code
    cut: int | None = None  # bytes of stdout beyond the limit

    def fits(self, outcome: CodeOutcome) -> bool:
        if not isinstance(outcome, self.kind):
            return False
        output: Output = outcome.output  # pyright: ignore[reportAttributeAccessIssue]
        if self.stdout is not None and output.stdout != self.stdout:
            return False
        if self.cut is not None and output.stdout_cut != self.cut:
            return False
        match outcome:
            case CodeRaised() if self.detail is not None:
                return outcome.error.startswith(str(self.detail))
            case CodeDied() if self.detail is not None:
                return outcome.exit_code == self.detail
            case _:
                return True


def printed(stdout: str) -> Ending:
    """It ends well, and this is all that it wrote."""
    return Ending(CodeOk, stdout)


def ok(cut: int | None = None) -> Ending:
    return Ending(CodeOk, cut=cut)


def raised(error: str | None = None, stdout: str | None = None) -> Ending:
    return Ending(CodeRaised, stdout, error)


def timed_out(stdout: str | None = None) -> Ending:
    return Ending(CodeTimedOut, stdout)


def out_of_memory() -> Ending:
    return Ending(CodeOutOfMemory)


def died(exit_code: int | None = None, stdout: str | None = None) -> Ending:
    return Ending(CodeDied, stdout, exit_code)


class Hostile(NamedTuple):
    name: str
    code: str
    ends: tuple[Ending, ...]  # one of them
    ends_as_cell: tuple[Ending, ...]  # the same unless said
    forms: tuple[Form, ...]
    stdin: str
    spares_its_notebook: bool  # a later cell finds `kept`; else it may have harmed itself, and nobody else
    shows: bool  # a cell's last value; else nothing but what it prints
    signals_others: bool  # dangerous where calls are neither in a pid namespace nor users of their own


def hostile(
    name: str,
    code: str,
    *ends: Ending,
    as_cell: tuple[Ending, ...] = (),
    forms: tuple[Form, ...] = ("program", "cell"),
    stdin: str = "",
    spares_its_notebook: bool = True,
    shows: bool = False,
    signals_others: bool = False,
) -> Hostile:
    code = textwrap.dedent(code).strip("\n")
    return Hostile(name, code, ends, as_cell or ends, forms, stdin, spares_its_notebook, shows, signals_others)


def any_outcome() -> tuple[Ending, ...]:
    """For a program that can only harm itself, in ways that differ between interpreters."""
    return (ok(), raised(), timed_out(), out_of_memory(), died())

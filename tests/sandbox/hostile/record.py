"""A hostile program: its name, its code, and its expected outcomes."""

import textwrap
from typing import Literal, NamedTuple

from asterism.bus.messages import CodeCrashed, CodeOk, CodeOutcome, CodeOutOfMemory, CodeRaised, CodeTimedOut, Output

Form = Literal["program", "cell"]  # a stateless call, or a cell of a notebook with the variable `kept`

# Placeholders in the code, which the arena fills in.
SECRET_FILE = "@SECRET_FILE@"  # path of a world-readable file
NEIGHBOURS = "@NEIGHBOURS@"  # pids of the neighbour's notebook, the servers and the test
NEIGHBOUR_FOLDERS = "@NEIGHBOUR_FOLDERS@"  # paths to the neighbour's folder


class Ending(NamedTuple):
    """An allowed outcome. A field without a value allows any value."""

    kind: type[CodeOutcome]
    stdout: str | None = None
    detail: str | int | None = None  # prefix of the error, or the exit code
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
            case CodeCrashed() if self.detail is not None:
                return outcome.exit_code == self.detail
            case _:
                return True


def printed(stdout: str) -> Ending:
    """Return success with exactly this output."""
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
    return Ending(CodeCrashed, stdout, exit_code)


class Hostile(NamedTuple):
    name: str
    code: str
    ends: tuple[Ending, ...]  # allowed outcomes of a program
    ends_as_cell: tuple[Ending, ...]
    forms: tuple[Form, ...]
    stdin: str
    keeps_notebook: bool  # whether `kept` must survive; if not, the program can harm its notebook
    shows: bool  # whether the cell prints the value of its last expression
    signals_others: bool  # whether the program is dangerous without pid namespaces and separate users
    reaches_limit: bool  # whether its process can live until the time limit

    def list_ends(self, form: Form) -> tuple[Ending, ...]:
        return self.ends if form == "program" else self.ends_as_cell


def hostile(
    name: str,
    code: str,
    *ends: Ending,
    as_cell: tuple[Ending, ...] = (),
    forms: tuple[Form, ...] = ("program", "cell"),
    stdin: str = "",
    keeps_notebook: bool = True,
    shows: bool = False,
    signals_others: bool = False,
    outlives_answer: bool = False,
) -> Hostile:
    code = textwrap.dedent(code).strip("\n")
    reaches_limit = outlives_answer or any(end.kind is CodeTimedOut for end in (*ends, *as_cell))
    return Hostile(
        name, code, ends, as_cell or ends, forms, stdin, keeps_notebook, shows, signals_others, reaches_limit
    )


CRASHED = (died(-11), died(-7), died(-6), died(-4), raised(), out_of_memory(), timed_out())


def any_outcome() -> tuple[Ending, ...]:
    """Return the outcomes of a program that can harm only itself, in ways that depend on the interpreter."""
    return (ok(), raised(), timed_out(), out_of_memory(), died())


def read_programs(programs: dict[str, str]) -> list[Hostile]:
    """Read programs by name. The comment in a program's first line contains further arguments of `hostile`."""
    read: list[Hostile] = []
    for name, text in programs.items():
        header, _, code = text.strip("\n").partition("\n")
        read.append(
            eval(f"hostile(name, code, {header.partition('# ')[2]}\n)", globals(), {"name": name, "code": code})
        )
    return read

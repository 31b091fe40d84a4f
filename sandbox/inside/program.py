"""Compiles and runs one text of model code in this process, and says how it ended. Standard library only.

An outcome is a list of texts: ["ok"], ["raised", error, traceback], ["memory"], or ["exit", code].
"""

import ast
import atexit
import os
import sys
from collections.abc import Callable
from types import CodeType, ModuleType
from typing import NoReturn, cast

from sandbox.inside.calls import Outcome
from sandbox.inside.tracebacks import error_line, traceback_text

CompiledCell = tuple[CodeType | None, CodeType | None]  # the statements, and the last expression
CELL, PROGRAM = "<cell>", "<program>"
_show = print  # what the code does to `print` must not change what a cell shows


def leave(code: object = None) -> NoReturn:
    """The `exit` and `quit` of interactive Python, which come from a module that the fork server leaves out."""
    raise SystemExit(code)


def fresh_main() -> ModuleType:
    """A `__main__` with nothing of the harness in it."""
    main = ModuleType("__main__")
    main.__dict__["__builtins__"] = sys.modules["builtins"]
    sys.modules["__main__"] = main
    return main


def run_program(code: str, main: ModuleType) -> Outcome:
    """Runs a whole program: threads that it waits for and its exit functions belong to it."""

    def body() -> None:
        exec(compile(code, PROGRAM, "exec"), main.__dict__)
        if "threading" in sys.modules:
            sys.modules["threading"]._shutdown()
        atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]

    outcome = _outcome_of(body)
    return ["ok"] if outcome == ["exit", "0"] else outcome


def run_cell(code: str | CompiledCell, main: ModuleType) -> Outcome:
    """Runs a notebook's cell: the value of a last expression is shown unless it is None."""

    def body() -> None:
        statements, last = _compile_cell(code) if isinstance(code, str) else code
        if statements is not None:
            exec(statements, main.__dict__)
        if last is not None:
            value = eval(last, main.__dict__)
            if value is not None:
                _show(repr(value))

    return _outcome_of(body)


def compiled_cell(code: str) -> CompiledCell | None:
    """None if it does not compile; `run_cell` says why."""
    try:
        return _compile_cell(code)
    except Exception:
        return None


def _compile_cell(code: str) -> CompiledCell:
    # Not ast.parse, whose frame would be in the traceback.
    tree = cast(ast.Module, compile(code, CELL, "exec", ast.PyCF_ONLY_AST))
    last = None
    if tree.body and isinstance(tree.body[-1], ast.Expr):
        expression = tree.body.pop()
        assert isinstance(expression, ast.Expr)
        last = compile(ast.Expression(expression.value), CELL, "eval")
    return compile(tree, CELL, "exec") if tree.body or last is None else None, last


def _outcome_of(body: Callable[[], None]) -> Outcome:
    try:
        body()
        _flush()
    except SystemExit as request:
        return ["exit", str(_exit_code(_code_of(request)))]
    except MemoryError as error:
        error.__traceback__ = None  # it holds what filled the memory
        return ["memory"]
    except BaseException as error:
        return _raised(error)
    return ["ok"]


def _code_of(request: SystemExit) -> object:
    try:
        return request.code
    except BaseException:  # a property of the code's own making
        return 1


def _raised(error: BaseException) -> Outcome:
    try:
        return ["raised", error_line(error), traceback_text(error, __file__)]
    except BaseException:  # it lies about itself, or there is no memory left to tell of it
        return ["raised", "BaseException: <exception str() failed>", ""]


def _exit_code(code: object) -> int:
    """As Python would leave: no number is 1, and a number that no C long holds is -1."""
    if code is None:
        return 0
    if isinstance(code, int):
        return int.__and__(code, 0xFF) if int.bit_length(code) < 64 else 0xFF
    try:
        _show(code, file=sys.stderr)
    except BaseException:
        return 1
    return 1


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


def flush() -> None:
    """Whatever the code has done to the streams."""
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        try:
            if stream is not None:
                stream.flush()
        except BaseException:
            continue


def end_of_a_fork(outcome: Outcome) -> NoReturn:
    """The code forked, and its child has come to the end of the code: it ends as a Python program would."""
    if outcome[0] == "raised":
        os.write(2, f"{outcome[2]}\n".encode("utf-8", "backslashreplace"))
    code = {"ok": 0, "exit": int(outcome[1]) if outcome[0] == "exit" else 0}.get(outcome[0], 1)
    end_process(code)


def end_process(code: int) -> NoReturn:
    """Nothing of what the code left behind runs: no finalizers, no exit functions."""
    flush()
    os._exit(code)

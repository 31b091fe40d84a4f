"""Compiles and runs the model's code in this process and returns the outcome.

An outcome is a list of strings: ["ok"], ["raised", error, traceback], ["memory"], or ["exit",
code].
"""

import ast
import atexit
import builtins
import importlib
import os
import sys
from collections.abc import Callable
from types import CodeType, ModuleType
from typing import NoReturn, cast

from asterism.sandbox.inside.call.tracebacks import format_error_line, format_traceback
from asterism.sandbox.inside.wire.call_wire import CallOutcome

CompiledCell = tuple[CodeType | None, CodeType | None]  # the statements, and the last expression
CELL, PROGRAM = "<cell>", "<program>"
_AWAIT = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
_CO_COROUTINE = 0x80  # the constant of `inspect`, a module that every process would load
_show = print  # the code may replace `print`


def exit_program(code: object = None) -> NoReturn:
    """Act as `exit` and `quit` of interactive Python: the fork server does not load the `site` module."""
    raise SystemExit(code)


def make_main_module() -> ModuleType:
    """Install and return an empty `__main__` module."""
    main = ModuleType("__main__")
    main.__dict__["__builtins__"] = sys.modules["builtins"]
    sys.modules["__main__"] = main
    return main


def run_program(code: str, main: ModuleType) -> CallOutcome:
    """Run a whole program, including its non-daemon threads and exit functions."""

    def run_body() -> None:
        exec(compile(code, PROGRAM, "exec"), main.__dict__)
        if "threading" in sys.modules:
            sys.modules["threading"]._shutdown()
        atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]

    outcome = _run_to_outcome(run_body)
    return ["ok"] if outcome == ["exit", "0"] else outcome


def run_cell(code: str | CompiledCell, main: ModuleType) -> CallOutcome:
    """Run a notebook's cell and show the value of its last expression.

    The value becomes `_`, as in interactive Python. A cell with `await` outside functions runs in an
    event loop of its own, which ends with the cell and cancels its tasks.
    """

    def run_body() -> None:
        codes = _compile_cell(code) if isinstance(code, str) else code
        if any(each is not None and each.co_flags & _CO_COROUTINE for each in codes):
            _run_awaiting(codes, main)
            return
        statements, last = codes
        if statements is not None:
            exec(statements, main.__dict__)
        if last is not None:
            _show_value(eval(last, main.__dict__))

    return _run_to_outcome(run_body)


def _show_value(value: object) -> None:
    if value is not None:
        _show(repr(value))
        builtins._ = value  # pyright: ignore[reportAttributeAccessIssue]


def _run_awaiting(codes: CompiledCell, main: ModuleType) -> None:
    asyncio = importlib.import_module("asyncio")

    async def run_body() -> BaseException | None:
        try:
            value = None
            for code in filter(None, codes):
                value = eval(code, main.__dict__)
                if code.co_flags & _CO_COROUTINE:
                    value = await value
            if codes[1] is not None:
                _show_value(value)
        except BaseException as error:  # raised outside the event loop, so that the traceback lacks its frames
            return error
        return None

    error = asyncio.run(run_body())
    if error is not None:
        raise error


def try_compile_cell(code: str) -> CompiledCell | None:
    """Compile a cell; return None if it does not compile. `run_cell` then reports the error."""
    try:
        return _compile_cell(code)
    except Exception:
        return None


def _compile_cell(code: str) -> CompiledCell:
    # ast.parse would add a frame to the traceback.
    tree = cast(ast.Module, compile(code, CELL, "exec", ast.PyCF_ONLY_AST | _AWAIT))
    last = None
    if tree.body and isinstance(tree.body[-1], ast.Expr):
        expression = tree.body.pop()
        assert isinstance(expression, ast.Expr)
        last = compile(ast.Expression(expression.value), CELL, "eval", _AWAIT)
    return compile(tree, CELL, "exec", _AWAIT) if tree.body or last is None else None, last


def _run_to_outcome(body: Callable[[], None]) -> CallOutcome:
    try:
        body()
        _flush_output()
    except SystemExit as request:
        return ["exit", str(_to_exit_status(_read_exit_code(request)))]
    except MemoryError as error:
        error.__traceback__ = None  # the traceback references the objects that filled the memory
        return ["memory"]
    except BaseException as error:
        return _build_raised_outcome(error)
    return ["ok"]


def _read_exit_code(request: SystemExit) -> object:
    try:
        return request.code
    except BaseException:  # the code may define `code` as a property
        return 1


def _build_raised_outcome(error: BaseException) -> CallOutcome:
    try:
        return ["raised", format_error_line(error), format_traceback(error, __file__)]
    except BaseException:  # a hostile __str__, or not enough memory
        return ["raised", "BaseException: <exception str() failed>", ""]


def _to_exit_status(code: object) -> int:
    """Return Python's status: 1 for an object that is not a number, 0xFF for a number beyond a C long."""
    if code is None:
        return 0
    if isinstance(code, int):
        return int.__and__(code, 0xFF) if int.bit_length(code) < 64 else 0xFF
    try:
        _show(code, file=sys.stderr)
    except BaseException:
        return 1
    return 1


def _flush_output() -> None:
    """Flush as an interpreter does at its end: a stream that is closed or None is no error."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name, None)
        if stream is not None and not getattr(stream, "closed", False):
            stream.flush()


def flush_all_streams() -> None:
    """Flush all streams and ignore errors: the code may have replaced or closed them."""
    for name in ("stdout", "stderr", "__stdout__", "__stderr__"):
        try:
            stream = getattr(sys, name, None)
            if stream is not None:
                stream.flush()
        except BaseException:
            continue


def exit_forked_child(outcome: CallOutcome) -> NoReturn:
    """Exit in a child that the code forked, with the output and exit code of a Python program."""
    if outcome[0] == "raised":
        os.write(2, f"{outcome[2]}\n".encode("utf-8", "backslashreplace"))
    code = {"ok": 0, "exit": int(outcome[1]) if outcome[0] == "exit" else 0}.get(outcome[0], 1)
    exit_process(code)


def exit_process(code: int) -> NoReturn:
    """Exit without the code's finalizers and exit functions."""
    flush_all_streams()
    os._exit(code)

"""Tests of the recognition of pure cells."""

import builtins
import io
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asterism.sandbox.inside.call.pure_cells import is_pure
from asterism.sandbox.inside.call.run_code import try_compile_cell

PURE = (
    "",
    "1 + 1",
    "x = 2\ny = f'{x:>5}|{x!r}'\nprint(x, y, sep='')",
    "xs = [3, 1, 2]\nxs[0] = xs[1:] + [4]\nsorted(xs), min(xs), {1, 2}, {'a': (1, None)}",
    "total = 0\nfor n in range(10):\n    if n % 2 and n > 3 or not n: total += n\ntotal",
    "while n < 20: n += 1",
    "a, b = b, a = 1, 2\ndel_me = a is b, 1 in (1, 2)",
    "undefined_name",
    "1 / 0",
    "n, s, flat, words",
)
IMPURE = (
    *("import math", "from math import *", "def f(): pass", "class C: pass", "f = lambda: 1"),
    *("[n for n in range(3)]", "s.upper()", "flat.append(1)", "open('file')", "input()", "id(n)", "exec('x = 1')"),
    *("__import__('os')", "exit()", "try: 1\nexcept Exception: pass", "with n: pass", "del n", "global n\nn = 1"),
    *("print(main)", "nested", "foreign"),
    "foreign = 1",  # the replaced value can have a finalizer
    "of_foreign",
    "int(shadowed)",
    "max(1, 2)",  # `max` shadows the builtin
    *("__builtins__", "assert n", "n: int = 1"),
)
NAMES: dict[str, Any] = {
    **{"__builtins__": builtins, "n": 1, "s": "text", "flat": [1, 2.0, "three", None], "words": {"a": b"b"}},
    "nested": [[1]],
    "foreign": io.StringIO(),
    "of_foreign": (io.StringIO(),),
    "shadowed": type("Number", (int,), {})(1),
    "max": len,
    "main": sys,
}


@pytest.fixture(autouse=True, scope="module")
def patch_interpreter() -> Iterator[None]:
    """Patch the interpreter as in a notebook process: no tracing, and the original standard output."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("asterism.sandbox.inside.call.pure_cells.TextIOWrapper", type(sys.stdout))
        patch.setattr(sys, "gettrace", lambda: None)
        yield


def compile_and_check(code: str, names: dict[str, Any]) -> bool:
    codes = try_compile_cell(code)
    assert codes is not None
    return is_pure(codes, names)


@pytest.mark.parametrize("code", PURE)
def test_computations_with_numbers_and_strings_are_pure(code: str) -> None:
    assert compile_and_check(code, NAMES)


@pytest.mark.parametrize("code", IMPURE)
def test_cells_that_can_have_effects_are_impure(code: str) -> None:
    assert not compile_and_check(code, NAMES)


def test_all_cells_are_impure_in_a_modified_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compile_and_check("print(1)", NAMES)
    assert not compile_and_check("print(1)", {**NAMES, "__builtins__": {"print": print}})
    with monkeypatch.context() as changed:
        changed.setattr(sys, "gettrace", lambda: print)
        assert not compile_and_check("print(1)", NAMES)
    with monkeypatch.context() as changed:
        changed.setattr(sys, "stdout", io.StringIO())
        assert not compile_and_check("print(1)", NAMES)
    with monkeypatch.context() as changed:
        changed.setattr(builtins, "abs", len)
        assert not compile_and_check("abs(1)", NAMES)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.binary(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.tuples(inner) | st.dictionaries(st.text(max_size=2), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(values)
def test_a_value_is_pure_only_if_its_containers_are_flat(value: object) -> None:
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list | tuple) else []
    flat = not any(isinstance(element, list | tuple | dict) for element in inner)
    assert compile_and_check("value", {**NAMES, "value": value}) == flat

"""Which cells may be run again instead of being kept."""

from __future__ import annotations

import builtins
import io
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.inside.plain_cells import is_plain
from sandbox.inside.program import compiled_cell

PLAIN = (
    "",
    "1 + 1",
    "x = 2\ny = f'{x:>5}|{x!r}'\nprint(x, y, sep='')",
    "xs = [3, 1, 2]\nxs[0] = xs[1:] + [4]\nsorted(xs), min(xs), {1, 2}, {'a': (1, None)}",
    "total = 0\nfor n in range(10):\n    if n % 2 and n > 3 or not n: total += n\ntotal",
    "while n < 20: n += 1",
    "a, b = b, a = 1, 2\ndel_me = a is b, 1 in (1, 2)",
    "nobody_has_defined_this",
    "1 / 0",
    "n, s, flat, words",
)
NOT_PLAIN = (
    "import math",
    "from math import *",
    "def f(): pass",
    "class C: pass",
    "f = lambda: 1",
    "[n for n in range(3)]",
    "s.upper()",
    "flat.append(1)",
    "open('file')",
    "input()",
    "id(n)",
    "exec('x = 1')",
    "__import__('os')",
    "exit()",
    "try: 1\nexcept Exception: pass",
    "with n: pass",
    "del n",
    "global n\nn = 1",
    "print(main)",
    "nested",
    "foreign",
    "foreign = 1",  # what was in it may have an end of its own
    "of_foreign",
    "int(shadowed)",
    "max(1, 2)",  # not the builtin any more
    "__builtins__",
    "assert n",
    "n: int = 1",
)
NAMES: dict[str, Any] = {
    "__builtins__": builtins,
    "n": 1,
    "s": "text",
    "flat": [1, 2.0, "three", None],
    "words": {"a": b"b"},
    "nested": [[1]],
    "foreign": io.StringIO(),
    "of_foreign": (io.StringIO(),),
    "shadowed": type("Number", (int,), {})(1),
    "max": len,
    "main": sys,
}


@pytest.fixture(autouse=True, scope="module")
def surroundings() -> Iterator[None]:
    """Those of a session's process: nothing traces it, and its output is the one that it was born with."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sandbox.inside.plain_cells._stdout", sys.__stdout__)
        patch.setattr(sys, "gettrace", lambda: None)
        yield


def judged(code: str, names: dict[str, Any]) -> bool:
    codes = compiled_cell(code)
    assert codes is not None
    return is_plain(codes, names)


@pytest.mark.parametrize("code", PLAIN)
def test_what_computes_with_numbers_and_texts_is_plain(code: str) -> None:
    assert judged(code, NAMES)


@pytest.mark.parametrize("code", NOT_PLAIN)
def test_what_may_have_effects_is_not(code: str) -> None:
    assert not judged(code, NAMES)


def test_nothing_is_plain_where_the_code_has_changed_its_surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    assert judged("print(1)", NAMES)
    assert not judged("print(1)", {**NAMES, "__builtins__": {"print": print}})
    with monkeypatch.context() as changed:
        changed.setattr(sys, "gettrace", lambda: print)
        assert not judged("print(1)", NAMES)
    with monkeypatch.context() as changed:
        changed.setattr(sys, "__stdout__", io.StringIO())
        assert not judged("print(1)", NAMES)
    with monkeypatch.context() as changed:
        changed.setattr(builtins, "abs", len)
        assert not judged("abs(1)", NAMES)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.binary(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.tuples(inner) | st.dictionaries(st.text(max_size=2), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(values)
def test_a_value_is_plain_only_if_it_holds_nothing_that_could_change_elsewhere(value: object) -> None:
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list | tuple) else []
    flat = not any(isinstance(one, list | tuple | dict) for one in inner)
    assert judged("value", {**NAMES, "value": value}) == flat

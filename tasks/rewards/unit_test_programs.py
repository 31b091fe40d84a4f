"""Two programs for the sandbox: one calls a model's function, and the other runs the tests. They exchange plain values.

The tests never run in the process of the model's code, which could exit with success, return an object that equals
everything, or change the tests. The sandbox receives the code of this module, so it imports only the standard library.
"""

import ast
import builtins
import io
import itertools
import json
import os
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from functools import partial
from typing import Any, cast

MAX_CALLS = 5000  # calls of one test program
MAX_ITEMS = 20_000  # items of a generator that a call returns
_EXACT_INT = 1 << 53
_UNARY = "neg pos abs invert trunc floor ceil round"
_BINARY = "add sub mul truediv floordiv mod divmod pow matmul lshift rshift and or xor"


class UnusableTests(Exception):
    """The tests of a row cannot run. `str(error)` is the cause."""


# ---------------------------------------------------------------- plain values


def encode(value: Any) -> Any:
    """Encode a value of built-in types or their subclasses as JSON. Raises TypeError for other objects."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        number = int.__index__(value)
        return number if abs(number) < _EXACT_INT else ["int", hex(number)]
    for kind, (types, encode_parts, _) in _CODECS.items():
        if isinstance(value, types):
            return [kind, *encode_parts(value)]
    if isinstance(value, Iterator):
        return ["iterator", *map(encode, itertools.islice(value, MAX_ITEMS))]
    raise TypeError(f"{type(value).__name__} is not a plain value")


def decode(data: Any) -> Any:
    """Decode the result of `encode`. Raises ValueError or TypeError for other JSON."""
    if not isinstance(data, list):
        return data
    kind, *parts = data
    if kind == "int":
        return int(parts[0], 16)
    if kind == "iterator":
        return iter([decode(each) for each in parts])
    return _CODECS[kind][2](parts)


def _encode_items(value: Any) -> list[Any]:
    return [encode(each) for each in value]


def _decode_items(parts: list[Any]) -> list[Any]:
    return [decode(each) for each in parts]


# Codecs by kind: the types, a function from a value to its parts, and the inverse function.
_CODECS: dict[str, tuple[Any, Callable[[Any], list[Any]], Callable[[list[Any]], Any]]] = {
    "float": (float, lambda value: [float.hex(value)], lambda parts: float.fromhex(*parts)),
    "complex": (
        complex,
        lambda value: [float.hex(value.real), float.hex(value.imag)],
        lambda parts: complex(*map(float.fromhex, parts)),
    ),
    "bytes": (bytes, lambda value: [bytes.hex(value)], lambda parts: bytes.fromhex(*parts)),
    "fraction": (
        Fraction,
        lambda value: [hex(value.numerator), hex(value.denominator)],
        lambda parts: Fraction(*(int(each, 16) for each in parts)),
    ),
    "range": (range, lambda value: [value.start, value.stop, value.step], lambda parts: range(*parts)),
    "list": (list, _encode_items, _decode_items),
    "tuple": (tuple, _encode_items, lambda parts: tuple(_decode_items(parts))),
    "set": (set, _encode_items, lambda parts: set(_decode_items(parts))),
    "frozenset": (frozenset, _encode_items, lambda parts: frozenset(_decode_items(parts))),
    "dict": (
        dict,
        lambda value: [[encode(key), encode(each)] for key, each in dict.items(value)],
        lambda parts: {decode(key): decode(each) for key, each in parts},
    ),
}


# ---------------------------------------------------------------- the model's program


def call_function(setup: str, program: str, name: str, calls: list[Any]) -> list[Any]:
    """Run `program` after `setup`, and call its function `name` with each of `calls`: encoded [arguments, keywords].

    An answer is ["value", value, arguments after the call], or ["raised", name of the type, text]. Exceptions of
    `program` itself, and a SystemExit of a call, are raised.
    """
    namespace: dict[str, Any] = {"__name__": "program"}
    exec(compile(setup, "<setup>", "exec"), namespace)
    namespace.pop(name, None)  # the program must define the function
    exec(compile(program, "<program>", "exec"), namespace)
    return [_answer(namespace[name], decode(call)) for call in calls]


def _answer(function: Any, call: Any) -> list[Any]:
    arguments, keywords = call
    try:
        value = encode(function(*arguments, **keywords))
        return ["value", value, encode(arguments)]
    except Exception as error:
        return ["raised", type(error).__name__, str(error)]


def print_answers() -> None:
    """Print the answers to the request on stdin. Output of the program is dropped."""
    request = json.load(sys.stdin)
    output = os.fdopen(os.dup(1), "w")
    sys.stdin, sys.stdout = io.StringIO(), io.StringIO()
    answers = call_function(**request)
    output.write(json.dumps(answers) + "\n")
    output.flush()


# ---------------------------------------------------------------- the tests


class Unknown:
    """A placeholder of an unknown value. All comparisons with it are true, so that the tests reach the next call."""

    def __getattr__(self, name: str) -> "Unknown":
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __iter__(self) -> Iterator["Unknown"]:
        return iter((self,))


def _define(names: Iterable[str], get_value: Callable[[Unknown], Any]) -> None:
    def operate(self: Unknown, *_arguments: Any, **_keywords: Any) -> Any:
        return get_value(self)

    for name in names:
        setattr(Unknown, f"__{name}__", operate)


_define(("call", "getitem", *_UNARY.split()), lambda unknown: unknown)
_define((f"{side}{name}" for name in _BINARY.split() for side in ("", "r")), lambda unknown: unknown)
_define(("eq", "ne", "lt", "le", "gt", "ge", "contains", "bool"), lambda _: True)
_define(("hash", "len", "int", "index"), lambda _: 1)
_define(("float",), lambda _: 1.0)
_define(("complex",), lambda _: 1j)


class _Stopped(BaseException):
    """The tests made MAX_CALLS calls, or a call with an unknown value."""


class Answers:
    """Replaces the model's function. Equal calls return answers in order; a call without an answer returns Unknown."""

    def __init__(self, calls: list[Any], answers: list[Any]) -> None:
        self._known: dict[str, deque[list[Any]]] = {}
        for call, answer in zip(calls, answers, strict=True):
            self._known.setdefault(json.dumps(call), deque()).append(answer)
        self.calls: list[Any] = []
        self.is_complete = True  # whether each call had an answer

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        if len(self.calls) == MAX_CALLS:
            self.is_complete = False
            raise _Stopped
        self.calls.append(self._encode([list(arguments), keywords]))
        known = self._known.get(json.dumps(self.calls[-1]))
        if not known:
            self.is_complete = False
            return Unknown()
        return self._give(known.popleft(), arguments)

    def _encode(self, call: list[Any]) -> Any:
        try:
            return encode(call)
        except TypeError as error:
            if self.is_complete:
                raise UnusableTests(f"an argument cannot be sent to the program: {error}") from None
            raise _Stopped from None  # an argument depends on an unknown value

    def _give(self, answer: list[Any], arguments: tuple[Any, ...]) -> Any:
        kind, *parts = answer
        if kind == "raised":
            name, text = parts
            error: Any = getattr(builtins, name, None)
            is_error = isinstance(error, type) and issubclass(error, Exception)
            raise cast(Any, error)(text) if is_error else RuntimeError(f"{name}: {text}")
        value, after = map(decode, parts)
        for argument, new in zip(arguments, after, strict=True):
            _change(argument, new)
        return value


def _change(argument: Any, new: Any) -> None:
    """Repeat the function's change of a mutable argument."""
    if isinstance(argument, list):
        argument[:] = new
    elif isinstance(argument, dict | set):
        argument.clear()
        argument.update(new)


def run_tests(setup: str, tests: str, name: str, calls: list[Any], answers: list[Any]) -> dict[str, Any]:
    """Run the tests with `answers` in place of the function `name`.

    The tests are statements, and functions `check(function)` and `test_*()` in them. The result has the `calls` of the
    tests; `is_complete`, whether each call had an answer; `error`, which is empty if the tests passed.
    Raises UnusableTests.
    """
    function = Answers(calls, answers)
    namespace: dict[str, Any] = {"__name__": "tests", "_is_open": lambda: not function.is_complete}
    error = ""
    try:
        exec(compile(setup, "<setup>", "exec"), namespace)
        code = compile(_relax_asserts(tests), "<tests>", "exec")
    except Exception as failure:
        raise UnusableTests(f"{type(failure).__name__}: {failure}") from None
    namespace[name] = function
    random.seed(0)  # so that each round makes the same calls
    try:
        exec(code, namespace)
        for test in _list_tests(namespace, function):
            test()
    except (UnusableTests, KeyboardInterrupt):
        raise
    except BaseException as failure:
        error = f"{type(failure).__name__}: {failure}"
    if not function.calls:
        raise UnusableTests(f"the tests do not call {name}{error and f' ({error})'}")
    return {"calls": function.calls, "is_complete": function.is_complete, "error": error}


def _list_tests(namespace: dict[str, Any], function: Answers) -> list[Callable[[], Any]]:
    tests: list[Callable[[], Any]] = []
    for name, each in namespace.items():
        if callable(each) and name == "check":
            tests.append(partial(each, function))
        elif callable(each) and name.startswith("test_"):
            tests.append(each)
    return tests


def _relax_asserts(tests: str) -> ast.Module:
    """Let the tests continue after a failed assert if an earlier call had no answer."""
    module = ast.parse(tests)
    for node in ast.walk(module):
        if isinstance(node, ast.Assert):
            is_open = ast.Call(ast.Name("_is_open", ast.Load()), [], [])
            node.test = ast.BoolOp(ast.Or(), [node.test, is_open])
    return ast.fix_missing_locations(module)


def print_test_result() -> None:
    """Print the result of the tests in the request on stdin. Output of the tests is dropped."""
    request, output = json.load(sys.stdin), sys.stdout
    sys.stdin, sys.stdout = io.StringIO(), io.StringIO()
    try:
        result = run_tests(**request)
    except UnusableTests as error:
        result = {"unusable": str(error)}
    output.write(json.dumps(result) + "\n")

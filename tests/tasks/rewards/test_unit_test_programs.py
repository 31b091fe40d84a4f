"""A program's values are encoded and decoded, and unit tests run against recorded results of the tested function."""

import collections
import json
import math
from fractions import Fraction
from typing import Any

import pytest

from asterism.tasks.rewards.unit_test_programs import MAX_CALLS, UnusableTests, call_function, decode, encode, run_tests

VALUES = [
    *(None, True, False, 0, -7, 1 << 53, -(10**5000), 0.1, -0.0, math.inf, 1j, "", "\ud800\u00e9\n", b"\x00a"),
    *(
        *([], [1, [2, (3, "x")]], (), {1, 2}, frozenset({(1, 2)}), {}, {(1, 2): [3], None: {}}, range(1, 9, 2)),
        Fraction(1, 3),
    ),
]


@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_decoding_restores_a_plain_value(value: Any) -> None:
    found = decode(json.loads(json.dumps(encode(value))))
    assert (type(found), found) == (type(value), value)
    assert repr(found) == repr(value) if not isinstance(value, int) else True


def test_decoding_restores_nan() -> None:
    assert math.isnan(decode(json.loads(json.dumps(encode(math.nan)))))


class Equal(int):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = int.__hash__


def test_decoding_turns_a_value_of_a_subclass_into_its_base_class() -> None:
    assert type(decode(encode(Equal(3)))) is int
    assert decode(encode(collections.Counter("aab"))) == {"a": 2, "b": 1}
    assert list(decode(encode(each for each in (1, 2)))) == [1, 2]


def test_the_error_for_any_other_object_names_its_type() -> None:
    with pytest.raises(TypeError, match="Match is not a plain value"):
        encode([__import__("re").match("a", "a")])


def judge(tests: str, program: str, setup: str = "", rounds: int = 9) -> tuple[bool, int]:
    """Return whether the program passes the tests, and the number of rounds of calls and answers."""
    calls: list[Any] = []
    answers: list[Any] = []
    for number in range(1, rounds + 1):
        result = run_tests(setup, tests, "f", calls, answers)
        if result["is_complete"]:
            return not result["error"], number
        calls = json.loads(json.dumps(result["calls"]))
        answers = json.loads(json.dumps(call_function(setup, program, "f", calls)))
    raise AssertionError("too many rounds")


ADD = "def f(a, b=1): return a + b"


@pytest.mark.parametrize(
    ("tests", "program", "expected"),
    [
        ("assert f(1, 2) == 3", ADD, (True, 2)),
        ("assert f(1, 2) == 4", ADD, (False, 2)),
        ("assert f(1, b=5) == 6\nassert f(1) == 2", ADD, (True, 2)),
        ("def check(g):\n    for n in range(50): assert g(n, n) == 2 * n", ADD, (True, 2)),
        ("def test_one(): assert f(1) == 2\ndef test_two(): assert f(1) == 3", ADD, (False, 2)),
        ("assert not f(-1)\nassert f(1) == 2", ADD, (True, 2)),
        ("assert f(f(f(1))) == 4", ADD, (True, 4)),  # each call depends on the previous answer
        ("n = 1\nwhile n < 4:\n    n = f(n)\nassert n == 4", ADD, (True, 4)),
        ("assert [f(n) for n in f(0, 3) * [1]] == [2] * 3", ADD, (True, 3)),
        ("assert abs(f(0.1, 0.2) - 0.3) < 1e-9 and round(f(1.26), 1) == 2.3", ADD, (True, 2)),
        ("a = [3, 1]\nassert f(a) is None\nassert a == [1, 3]", "def f(a): a.sort()", (True, 2)),
        ("a = {1: 2}\nf(a)\nassert a == {}", "def f(a): a.clear()", (True, 2)),
        ("try:\n    f(1)\nexcept ValueError as e:\n    assert str(e) == 'no'\nelse:\n    assert False", "def f(a): raise ValueError('no')", (True, 2)),
        ("assert list(f(3)) == [0, 1, 2]", "def f(n): yield from range(n)", (True, 2)),
        ("import random\nfor _ in range(9):\n    n = random.random()\n    assert f(n) == n + 1", ADD, (True, 2)),
        ("assert f(1) == 1\nassert f(1) == 2", "n = 0\ndef f(_):\n    global n\n    n += 1\n    return n", (True, 2)),
        ("assert len(f(1)) == 2", "def f(_): return None", (False, 2)),
        ("assert f(1) is True", "def f(_): return 1", (False, 2)),
    ],
)  # fmt: skip
def test_the_answers_decide_whether_the_tests_pass(tests: str, program: str, expected: tuple[bool, int]) -> None:
    assert judge(tests, program) == expected


def test_programs_and_tests_have_the_setups_helpers_but_not_its_stub() -> None:
    setup = "import math\ndef helper(n): return n + 1\ndef f(n):\n    'Add two.'"
    assert judge("assert f(1) == helper(helper(1))", "def f(n): return helper(n + math.floor(1.5))", setup) == (True, 2)
    with pytest.raises(KeyError):
        judge("assert f(1) is None", "", setup)


@pytest.mark.parametrize(
    ("tests", "cause"),
    [
        ("assert f(", "SyntaxError: '\\(' was never closed"),
        ("assert 1 == 1", "the tests do not call f$"),
        ("assert g(1) == 1", "the tests do not call f \\(NameError: name 'g' is not defined\\)"),
        ("f(open)", "an argument cannot be sent to the program: builtin_function_or_method is not a plain value"),
    ],
)
def test_unusable_tests_are_an_error_instead_of_a_reward(tests: str, cause: str) -> None:
    with pytest.raises(UnusableTests, match=cause):
        judge(tests, ADD)


def test_the_number_of_calls_in_an_endless_test_is_bounded() -> None:
    result = run_tests("", "while True: f(1)", "f", [], [])
    assert (len(result["calls"]), result["is_complete"]) == (MAX_CALLS, False)


@pytest.mark.parametrize(
    "answer", [["value", ["list", 1], []], ["value"], ["raised", "exec", "x"], ["value", ["x"], [1]]]
)
def test_a_forged_answer_fails_the_tests(answer: list[Any]) -> None:
    (call,) = run_tests("", "assert f(1) == 2", "f", [], [])["calls"]
    result = run_tests("", "assert f(1) == 2", "f", [call], [answer])
    assert result["is_complete"] and result["error"]

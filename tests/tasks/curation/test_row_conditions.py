"""The language of `asterism data filter --keep`: comparisons of known numbers, without execution of Python."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asterism.configs.errors import UnusableInput
from asterism.tasks.curation.row_conditions import parse_condition

NAMES = ("solved", "rollouts", "rate", "spread")
VALUES = {"solved": 3.0, "rollouts": 8.0, "rate": 0.375, "spread": 1.0}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *(("solved < rollouts", True), ("solved<8", True), (" solved == 3 ", True), ("solved != 3", False)),
        *(("0 < solved < rollouts", True), ("0 < solved < 3", False), ("0.25 <= rate <= 0.5", True)),
        *(("not rate > 0.5", True), ("solved < 1 or solved > 2", True), ("solved > 1 and spread == 0", False)),
        ("not (solved > 1 and spread == 0)", True),
        ("rollouts - solved >= 5", True),
        *(("solved / rollouts == rate", True), ("-solved < -2.5", True), ("solved * 2 + 1 > 7", False)),
        ("1e1 > rollouts", True),
    ],
)
def test_a_condition_has_the_value_of_pythons_comparison(text: str, expected: bool) -> None:
    assert parse_condition(text, NAMES).is_met(VALUES) is expected


@pytest.mark.parametrize(
    "text",
    [
        *("", "solved", "3", "True", "solved + 1", "not solved", "solved < k", "solved < True", "solved < '8'"),
        *("__import__('os').system('true') > 0", "solved.real > 1", "solved[0] > 1", "(lambda: 1)() > 0", "f'{1}' > 0"),
        *(
            *("solved ** 9 > 1", "solved % 2 == 0", "solved // 2 > 1", "solved << 9 > 1", "solved in (1, 2)"),
            "solved is 3",
        ),
        *("solved < 1 if rate else 2 > 1", "(x := 1) > 0", "[1] < [2]", "{1} < {2}", "solved < 1; rate > 0", "a = 1"),
        *("solved <", "(solved < 1", "solved < 1j", "solved\x00 < 1", "solved < None", "solved < ...", "+solved < 1"),
        *("solved < 1e999 and x", f"solved < {'9' * 400}", f"{'(' * 240}solved{')' * 240}", "not " * 120, "1 <" * 200),
    ],
)
def test_other_expressions_are_refused_with_the_flag(text: str) -> None:
    with pytest.raises(UnusableInput, match="--keep"):
        parse_condition(text, NAMES)


def test_a_division_by_zero_names_the_values() -> None:
    condition = parse_condition("1 / spread > 0", NAMES)
    with pytest.raises(UnusableInput, match="division by zero, with spread = 0"):
        condition.is_met(VALUES | {"spread": 0.0})


@given(st.text(max_size=60))
def test_any_text_is_a_condition_or_is_refused(text: str) -> None:
    try:
        result = parse_condition(text, NAMES).is_met(VALUES)
    except UnusableInput as error:
        assert "--keep" in str(error)
    else:
        assert isinstance(result, bool)


_NUMBERS = st.recursive(
    st.one_of(st.sampled_from(NAMES), st.integers(0, 9).map(str), st.just("0.5")),
    lambda inner: st.builds("({} {} {})".format, inner, st.sampled_from("+-*"), inner),
    max_leaves=4,
)
_COMPARED = st.builds("{} {} {}".format, _NUMBERS, st.sampled_from(["<", "<=", ">", ">=", "==", "!="]), _NUMBERS)
_TESTS = st.recursive(
    _COMPARED,
    lambda inner: st.one_of(
        inner.map("not ({})".format), st.builds("({} {} {})".format, inner, st.sampled_from(["and", "or"]), inner)
    ),
    max_leaves=4,
)


@given(_TESTS, st.fixed_dictionaries(dict.fromkeys(NAMES, st.integers(0, 8).map(float))))
def test_generated_conditions_have_the_value_of_python(text: str, values: dict[str, float]) -> None:
    assert parse_condition(text, NAMES).is_met(values) is eval(text, {}, values)

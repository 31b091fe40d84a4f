"""Encoded tables are TOML that the standard library reads back."""

import math
import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asterism.configs.toml_text import encode_table, encode_value

TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
SCALARS = TEXTS | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False)
DATES = st.dates() | st.datetimes() | st.times()
VALUES = st.recursive(SCALARS | DATES, lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner), max_leaves=12)


@pytest.mark.slow
@given(table=st.dictionaries(TEXTS, VALUES))
def test_a_table_is_read_back_unchanged(table: dict[str, Any]) -> None:
    assert tomllib.loads(encode_table(table)) == table


def test_the_values_of_a_table_precede_its_subtables() -> None:
    table = {"inner": {"tasks": [{"name": "a"}, {"name": "b"}]}, "seed": 1, "path with spaces": "x\x7f\n"}
    assert encode_table(table) == (
        'seed = 1\n"path with spaces" = "x\\u007f\\n"\n\n[inner]\n\n[[inner.tasks]]\nname = "a"\n\n'
        '[[inner.tasks]]\nname = "b"\n'
    )


def test_numbers_keep_their_type() -> None:
    assert [encode_value(value) for value in (1, 1.0, 1e-9, math.inf, -math.inf)] == [
        *("1", "1.0", "1e-09", "inf", "-inf")
    ]


def test_a_value_that_toml_cannot_express_is_refused() -> None:
    with pytest.raises(TypeError, match="TOML has no NoneType"):
        encode_table({"key": [None]})

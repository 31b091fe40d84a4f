"""The check of a call's arguments, and the errors in tool responses."""

import json
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asterism.policies.tools.tool_arguments import ArgumentError, check_arguments
from asterism.policies.tools.tool_schema import build_tool_schema


def search(
    query: str,
    k: int = 3,
    weight: float | None = None,
    exact: bool = False,
    kind: Literal["book", "map"] = "book",
    tags: list[str] | None = None,
    limits: dict[str, list[int]] | None = None,
    place: str | list[int] = "",
    extra: Any = None,
) -> str:
    """Search the archive.

    Args:
        query: The words.
        k: The number of results.
        weight: The weight of the query.
        exact: Match all words.
        kind: The kind of the results.
        tags: The tags of the results.
        limits: The limits by shelf.
        place: The place, by name or by numbers.
        extra: Anything.
    """
    return query


PARAMETERS = build_tool_schema(search).parameters


def check(text: str) -> dict[str, Any]:
    return check_arguments(json.loads(text), PARAMETERS)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("{}", '"query" must be given, as a string'),
        ('{"query": 1}', '"query" must be a string, not 1'),
        ('{"query": null}', '"query" must be a string, not null'),
        ('{"query": "", "qeury": ""}', 'unknown parameter "qeury"; known: "query", "k"'),
        ('{"query": "", "k": "three"}', '"k" must be an integer, not "three"'),
        ('{"query": "", "k": 3.0}', '"k" must be an integer, not 3.0'),
        ('{"query": "", "k": true}', '"k" must be an integer, not true'),
        ('{"query": "", "k": null}', '"k" must be an integer, not null'),
        ('{"query": "", "k": 9223372036854775808}', '"k" must be an integer of at most 64 bits'),
        ('{"query": "", "weight": "1"}', '"weight" must be a number or null, not "1"'),
        ('{"query": "", "weight": false}', '"weight" must be a number or null, not false'),
        ('{"query": "", "weight": NaN}', '"weight" must be a finite number'),
        ('{"query": "", "weight": 1e999}', '"weight" must be a finite number'),
        (f'{{"query": "", "weight": 1{"0" * 400}}}', '"weight" must be a finite number'),
        ('{"query": "", "exact": 1}', '"exact" must be true or false, not 1'),
        ('{"query": "", "kind": "Book"}', '"kind" must be one of "book", "map", not "Book"'),
        ('{"query": "", "tags": "a"}', '"tags" must be a list or null, not "a"'),
        ('{"query": "", "tags": ["a", 2]}', '"tags[1]" must be a string, not 2'),
        ('{"query": "", "limits": {"a": [1, "x"]}}', '"limits.a[1]" must be an integer, not "x"'),
        ('{"query": "", "place": ["x"]}', '"place[0]" must be an integer, not "x"'),
        ('{"query": "", "place": 3}', '"place" must be a string or a list, not 3'),
        ('{"query": "\\ud800"}', '"query" contains half a surrogate pair'),
        ('{"query": "", "extra": {"a": ["\\udfff"]}}', '"extra.a[0]" contains half a surrogate pair'),
        ('{"query": "", "extra": {"\\udfff": 1}}', '"extra" contains half a surrogate pair'),
        ('{"query": "", "\\udfff": 1}', 'unknown parameter "\\udfff"'),
        ('{"query": "", "k": "дв\\ud800"}', '"k" must be an integer, not "дв\\ud800"'),
        (f'{{"query": "", "k": "{"x" * 500}"}}', "..."),
    ],
)
def test_the_error_names_the_path_the_type_and_the_value(text: str, error: str) -> None:
    with pytest.raises(ArgumentError) as raised:
        check(text)
    said = str(raised.value)
    assert error in said
    assert len(said.encode()) < 250


def test_an_integer_becomes_a_number_and_nothing_else_is_converted() -> None:
    checked = check(
        '{"query": "1", "weight": 2, "place": [3], "tags": null, "extra": [1, 2.5, true, null, {"a": "b"}]}'
    )
    assert checked == {
        **{"query": "1", "weight": 2.0, "place": [3], "tags": None},
        "extra": [1, 2.5, True, None, {"a": "b"}],
    }
    assert isinstance(checked["weight"], float)
    assert isinstance(checked["extra"][0], int)


def test_a_choice_must_have_the_type_of_its_value() -> None:
    def tool(one: Literal[1]) -> None:
        """Take one.

        Args:
            one: One.
        """

    parameters = build_tool_schema(tool).parameters
    assert check_arguments({"one": 1}, parameters) == {"one": 1}
    with pytest.raises(ArgumentError, match="must be an integer, not true"):
        check_arguments({"one": True}, parameters)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec=None), max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.slow
@given(st.dictionaries(st.sampled_from(list(PARAMETERS["properties"])), VALUES))
def test_accepted_arguments_and_errors_can_be_encoded_in_a_message(arguments: dict[str, Any]) -> None:
    try:
        checked = check_arguments(arguments, PARAMETERS)
    except ArgumentError as error:
        assert str(error).encode()
    else:
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(checked)) == checked
        assert check_arguments(checked, PARAMETERS) == checked


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        (True, 5),
        (False, 5),
        ({"$ref": "#/$defs/X"}, {"a": 1}),
        ({"oneOf": [{"type": "string"}]}, 1),
        ({"type": "object", "properties": {"d": {"type": "integer"}}, "additionalProperties": False}, {"d": 1}),
        ({"type": "array", "items": True}, [1, "a"]),
        ({"anyOf": [{"type": "string"}, True]}, 3),
        ({"const": 3, "title": "T", "default": 4}, 3),
    ],
)
def test_unknown_keywords_of_schemas_are_ignored(schema: Any, value: object) -> None:
    assert check_arguments({"x": value}, {"type": "object", "properties": {"x": schema}}) == {"x": value}

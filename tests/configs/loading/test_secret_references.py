"""References to environment variables are resolved, and the values are hidden in texts."""

import pytest

from asterism.configs.errors import UnusableInput
from asterism.configs.loading.secret_references import hide_secrets, resolve_references

ENVIRONMENT = {"TOKEN": "planted-4711", "LONG": "planted-4711-and-more", "EMPTY": "", "HOST": "h"}


@pytest.mark.parametrize(
    ("value", "resolved"),
    [
        ("${TOKEN}", "planted-4711"),
        ("Bearer ${TOKEN}", "Bearer planted-4711"),
        ("${HOST}:${TOKEN}@${HOST}", "h:planted-4711@h"),
        ("${EMPTY}", ""),
        ("$${TOKEN}", "${TOKEN}"),
        ("$${no name}", "${no name}"),
        ("$TOKEN, $ and {TOKEN}", "$TOKEN, $ and {TOKEN}"),
        ({"headers": {"Authorization": "Bearer ${TOKEN}"}}, {"headers": {"Authorization": "Bearer planted-4711"}}),
        (["a", "${TOKEN}", 3, None], ["a", "planted-4711", 3, None]),
        (7, 7),
        (True, True),
    ],
)
def test_a_reference_at_any_depth_is_replaced_by_the_value_of_its_variable(value: object, resolved: object) -> None:
    assert resolve_references({"key": value}, "tasks.t.parameters", ENVIRONMENT).table == {"key": resolved}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("${ABSENT}", "tasks.t.parameters.key: the environment variable ABSENT is not set"),
        ({"a": ["x", "${ABSENT}"]}, r"tasks.t.parameters.key.a\[1\]: the environment variable ABSENT is not set"),
        ("${}", r"tasks.t.parameters.key: \$\{\} names no environment variable; write \$\$\{\}"),
        ("${TOKEN:-x}", r"key: \$\{TOKEN:-x\} names no environment variable; write \$\$\{TOKEN:-x\} for this text"),
    ],
)
def test_an_unusable_reference_is_refused_with_its_key(value: object, message: str) -> None:
    with pytest.raises(UnusableInput, match=message):
        resolve_references({"key": value}, "tasks.t.parameters", ENVIRONMENT)


def test_a_variable_with_a_reference_in_its_value_is_not_resolved_again() -> None:
    assert resolve_references({"a": "${A}"}, "k", {"A": "${B}", "B": "b"}).table == {"a": "${B}"}


def test_values_of_references_are_hidden_in_texts() -> None:
    secrets = resolve_references({"a": "${TOKEN}", "b": "${LONG}", "c": "${HOST}"}, "k", ENVIRONMENT).secrets
    text = "401 for http://h/?key=planted-4711-and-more, not planted-4711"
    assert hide_secrets(text, secrets) == "401 for http://h/?key=${LONG}, not ${TOKEN}"

"""Tests of calls in the form `[name(argument=value), ...]`."""

from typing import Any

import pytest

from asterism.engine.data.call_lists import parse_call_list


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('[get_time(zone="CET")]', [("get_time", {"zone": "CET"})]),
        (' [Get Time(zone="CET", hour=3)] ', [("Get Time", {"zone": "CET", "hour": 3})]),
        ("[geo.find(a=1), /v2/rates(from='USD', to-code='EUR')]", [("geo.find", {"a": 1}), ("/v2/rates", {"from": "USD", "to-code": "EUR"})]),
        ("[Get User's Likes(user='x'), Get Rounds (Esports)(id=-2.5)]", [("Get User's Likes", {"user": "x"}), ("Get Rounds (Esports)", {"id": -2.5})]),
        ("[ping()]", [("ping", {})]),
        ('[ask(text="a, b) and [c] \\"d\\" e=f(g)")]', [("ask", {"text": 'a, b) and [c] "d" e=f(g)'})]),
        ("[ask(text='it is true, not \\'null\\'')]", [("ask", {"text": "it is true, not 'null'"})]),
        ('[ask(text="two\nlines")]', [("ask", {"text": "two\nlines"})]),
        ("[set(a=true, b=False, c=null, d=None)]", [("set", {"a": True, "b": False, "c": None, "d": None})]),
        (
            "[set(a=[1, 2.0, [3]], b={'c': [true, {\"d\": null}]}, e=(1, 'f'))]",
            [("set", {"a": [1, 2.0, [3]], "b": {"c": [True, {"d": None}]}, "e": [1, "f"]})],
        ),
    ],
)  # fmt: skip
def test_names_and_literals_of_calls_are_read(text: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
    assert parse_call_list(text) == [{"name": name, "arguments": arguments} for name, arguments in calls]


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "Hello.", "[see page 3]", "[see the manual (page 3)]", "[1, 2, 3]", '["a(b=1)"]'),
        *("[a](http://b.c)", "[a(b=1)] is the call.", "[a(b=1), c]", "[a(1)]", "[a(b=1, b=2)]", "[a(b=New York)]"),
        *("[a(b=f(1))]", "[a(b={1, 2})]", "[a(b=1e999)]", "[a(b=1]", "[a(b=1))]", "[(b=1)]", "[a(b='c)]"),
    ],
)
def test_another_text_is_not_a_list_of_calls(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_call_list(text)

"""Schemas of tools, derived from signatures and docstrings."""

import json
from collections.abc import Callable
from typing import Annotated, Any, Literal, Optional, Union

import pytest
from transformers.utils import get_json_schema  # pyright: ignore

from asterism.policies.tools.python_tools import TOOL_SCHEMAS
from asterism.policies.tools.tool_schema import ToolSchemaError, build_tool_schema


def lookup(query: str, k: int = 3) -> str:
    """Look a query up.

    The archive has
    two shelves.

    Args:
        query: The words to look for, which may
            take several lines.

        k: The number of results.

    Returns:
        str: The results: one per line.

    Raises:
        ValueError: Without words.
    """
    return query * k


def no_parameters() -> None:
    """Ring the bell."""


def plain_types(a: str, b: int, c: float, d: bool, e: None, f: Any) -> None:
    """Take all plain types.

    Args:
        a: A text.
        b: A count.
        c: A length in m, such as 1.5: the default.
        d: A switch.
        e: Nothing.
        f: Anything.
    """


def optionals(a: Optional[str] = None, b: int | None = None, c: Union[list[int], None] = None) -> None:  # noqa: UP007, UP045
    """Take nothing, if need be.

    Args:
        a: A text.
        b: A count.
        c: Some counts.
    """


def unions(a: str | int, b: float | int | None, c: list[str] | str, d: dict[str, int] | list[int] | None) -> None:
    """Take one of several types.

    Args:
        a: A text or a count.
        b: A number.
        c: Texts.
        d: Numbers.
    """


def lists(a: list[str], b: list[list[float]], c: list, d: list[dict[str, int]]) -> None:  # type: ignore
    """Take lists.

    Args:
        a: Texts.
        b: A matrix.
        c: Anything.
        d: Counts.
    """


def dictionaries(a: dict[str, float], b: dict, c: dict[str, list[str | int]]) -> None:  # type: ignore
    """Take objects.

    Args:
        a: Lengths.
        b: Anything.
        c: Texts by name.
    """


def literals(
    a: Literal["x", "y"], b: Literal[1, 2, "all"], c: Literal[True], d: Literal["x", None], e: Literal["z"] | None
) -> None:
    """Take a choice.

    Args:
        a: A letter.
        b: A count.
        c: Always.
        d: A letter or nothing.
        e: The last letter or nothing.
    """


def choices(drink: str, sizes: int = 1) -> None:
    """Pour a drink.

    Args:
        drink: The drink (choices: ["tea", "coffee "])
        sizes: How large. (Choices: [1, 2])
    """


def annotated(a: Annotated[int, "Not shown."], b: Annotated[list[str], "Not shown."] | None = None) -> None:
    """Take annotated types.

    Args:
        a: A count.
        b: Some texts.
    """


def quoted_types(a: "list[int]", *, b: "str | None" = None) -> "str":
    """Take types in quotes, and a parameter by name.

    Args:
        a: Counts, "quoted" and ümläuted.
        b: A text.
    """
    return str(a)


async def asynchronous(url: str) -> dict[str, Any]:
    """Fetch a page.
    Args:
        url: Its address: https://host/path.
    Returns:
        The page.
    """
    return {"url": url}


class Shelf:
    def find(self, title: str) -> str:
        """Find a book.

        Args:
            title: The title of the book.
        """
        return title

    def has_no_parameters(self) -> None:
        """Dust the shelf."""


TOOLS: list[Callable[..., object]] = [
    *(lookup, no_parameters, plain_types, optionals, unions, lists, dictionaries, literals, choices),
    *(annotated, quoted_types, asynchronous, Shelf.find, Shelf().find, Shelf.has_no_parameters),
]


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.__qualname__)
def test_the_schema_equals_that_of_transformers(tool: Callable[..., object]) -> None:
    expected = get_json_schema(tool)
    expected["function"].pop("return", None)
    if not expected["function"]["parameters"]["properties"]:
        expected["function"]["parameters"].pop("required", None)
    assert build_tool_schema(tool).to_json() == json.dumps(expected)  # including the order of keys


def test_the_type_may_contain_the_description() -> None:
    def tool(k: Annotated[int, "The number of results."], q: Annotated[str, "The words."] = "x") -> None:
        """Look up."""

    assert build_tool_schema(tool).parameters == {
        "type": "object",
        "properties": {
            "k": {"type": "integer", "description": "The number of results."},
            "q": {"type": "string", "description": "The words."},
        },
        "required": ["k"],
    }


def test_further_lines_and_types_in_the_docstring_belong_to_their_parameter() -> None:
    def tool(k: int, q: str) -> None:
        """Look up.

        Args:
            k (int): The number of results.
                Example: 3.
            q (str, optional): The words.

        Example:
            k: never mentioned.
        """

    descriptions = {
        name: each["description"] for name, each in build_tool_schema(tool).parameters["properties"].items()
    }
    assert descriptions == {"k": "The number of results. Example: 3.", "q": "The words."}


def without_docstring(k: int) -> None: ...


def without_annotation(k) -> None:  # type: ignore
    """Look up.

    Args:
        k: The number of results.
    """


def without_description(k: int) -> None:
    """Look up."""


def with_a_set(k: int, names: set[str]) -> None:
    """Look up.

    Args:
        k: The number of results.
        names: Where.
    """


def with_positions(*k: int) -> None:
    """Look up.

    Args:
        k: The number of results.
    """


def with_numbered_keys(k: dict[int, str]) -> None:
    """Look up.

    Args:
        k: The number of results.
    """


def with_a_literal_of_bytes(k: Literal[b"1"]) -> None:
    """Look up.

    Args:
        k: The number of results.
    """


def with_wrong_choices(k: int) -> None:
    """Look up.

    Args:
        k: The number of results. (choices: ["one"])
    """


def with_broken_choices(k: int) -> None:
    """Look up.

    Args:
        k: The number of results. (choices: [1, )
    """


def with_an_unknown_type(k: "Unknown") -> None:  # type: ignore # noqa: F821
    """Look up.

    Args:
        k: The number of results.
    """


@pytest.mark.parametrize(
    ("tool", "parts"),
    [
        (without_docstring, ["without_docstring", "Google docstring"]),
        (3, ["3: a tool is a function"]),
        (without_annotation, ["without_annotation, parameter 'k'", "no type annotation"]),
        (without_description, ["without_description, parameter 'k'", "no description", "`Args:`"]),
        (with_a_set, ["with_a_set, parameter 'names'", "set[str] is not supported", "list[T]"]),
        (with_positions, ["with_positions, parameter 'k'", "*args"]),
        (with_numbered_keys, ["parameter 'k'", "dict[int, str] is not supported"]),
        (with_a_literal_of_bytes, ["parameter 'k'", "Literal"]),
        (with_wrong_choices, ["parameter 'k'", 'must be an integer, not "one"']),
        (with_broken_choices, ["parameter 'k'", "not a JSON list"]),
        (with_an_unknown_type, ["with_an_unknown_type", "'Unknown' is not defined"]),
    ],
)
def test_an_error_names_the_function_and_the_parameter(tool: Any, parts: list[str]) -> None:
    with pytest.raises(ToolSchemaError) as raised:
        build_tool_schema(tool)
    for part in parts:
        assert part in str(raised.value)


def test_the_python_tools_have_their_schemas() -> None:
    """Golden dialogues and trained checkpoints depend on every byte."""
    assert [schema.to_json() for schema in TOOL_SCHEMAS.values()] == [
        '{"type": "function", "function": {"name": "jupyter_code", "description": "Run Python code in a notebook. '
        'Names defined in earlier calls are still there.", "parameters": {"type": "object", "properties": '
        '{"code": {"type": "string", "description": "The Python code to run."}}, "required": ["code"]}}}',
        '{"type": "function", "function": {"name": "python_code_with_standard_io", "description": "Run a Python '
        'program of its own, with the given standard input.", "parameters": {"type": "object", "properties": '
        '{"code": {"type": "string", "description": "The Python code to run."}, "input": {"type": "string", '
        '"description": "What the code reads from standard input."}}, "required": ["code", "input"]}}}',
    ]

"""Schemas of tools, derived from signatures and docstrings."""

import inspect
import json
import typing
from collections.abc import Callable
from typing import Annotated, Any

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


DESCRIPTIONS = ("A text.", "A count.", "A length in m, such as 1.5: the default.", "A switch.", "Nothing.", "Anything.")
# Parameter lists of tools that return None.
SIGNATURES = {
    "plain_types": "a: str, b: int, c: float, d: bool, e: None, f: Any",
    "optionals": "a: Optional[str] = None, b: int | None = None, c: Union[list[int], None] = None",
    "unions": "a: str | int, b: float | int | None, c: list[str] | str, d: dict[str, int] | list[int] | None",
    "lists": "a: list[str], b: list[list[float]], c: list, d: list[dict[str, int]]",
    "dictionaries": "a: dict[str, float], b: dict, c: dict[str, list[str | int]]",
    "literals": 'a: Literal["x", "y"], b: Literal[1, 2, "all"], c: Literal[True], d: Literal["x", None], e: Literal["z"] | None',
    "annotated": 'a: Annotated[int, "Not shown."], b: Annotated[list[str], "Not shown."] | None = None',
}


def define(name: str, parameters: str, *descriptions: str) -> Callable[..., object]:
    """Define a function whose docstring has these descriptions of its parameters."""
    namespace = dict(vars(typing))
    exec(f"def {name}({parameters}) -> None: pass", namespace)
    names = inspect.signature(namespace[name]).parameters
    lines = [f"    {each}: {text}" for each, text in zip(names, descriptions, strict=False)]
    namespace[name].__doc__ = "\n".join(["Look up.", *(["", "Args:", *lines] if lines else [])])
    return namespace[name]


def choices(drink: str, sizes: int = 1) -> None:
    """Pour a drink.

    Args:
        drink: The drink (choices: ["tea", "coffee "])
        sizes: How large. (Choices: [1, 2])
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
    *(lookup, no_parameters, choices, quoted_types, asynchronous, Shelf.find, Shelf().find, Shelf.has_no_parameters),
    *(define(name, parameters, *DESCRIPTIONS) for name, parameters in SIGNATURES.items()),
]


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.__qualname__)
def test_the_schema_equals_that_of_transformers(tool: Callable[..., object]) -> None:
    expected = get_json_schema(tool)
    expected["function"].pop("return", None)
    if not expected["function"]["parameters"]["properties"]:
        expected["function"]["parameters"].pop("required", None)
    assert build_tool_schema(tool).to_json() == json.dumps(expected)  # the order of keys also agrees


def test_an_annotated_type_can_contain_the_description() -> None:
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


K = "The number of results."


@pytest.mark.parametrize(
    ("tool", "parts"),
    [
        (without_docstring, ["without_docstring", "Google docstring"]),
        (3, ["3: a tool is a function"]),
        (define("f", "k", K), ["f, parameter 'k'", "no type annotation"]),
        (define("f", "k: int"), ["f, parameter 'k'", "no description", "`Args:`"]),
        (define("f", "a: int, b: set[str]", K, "Where."), ["f, parameter 'b'", "set[str] is not supported", "list[T]"]),
        (define("f", "*k: int", K), ["f, parameter 'k'", "*args"]),
        (define("f", "k: dict[int, str]", K), ["parameter 'k'", "dict[int, str] is not supported"]),
        (define("f", 'k: Literal[b"1"]', K), ["parameter 'k'", "Literal"]),
        (define("f", "k: int", f'{K} (choices: ["one"])'), ["parameter 'k'", 'must be an integer, not "one"']),
        (define("f", "k: int", f"{K} (choices: [1, )"), ["parameter 'k'", "not a JSON list"]),
        (define("f", 'k: "Unknown"', K), ["f", "'Unknown' is not defined"]),
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

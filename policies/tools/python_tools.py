"""The Python tools. The function of a tool returns the program that the sandbox runs for a call."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

from asterism.configs.schema.dialogue import ToolName
from asterism.policies.tools.tool_schema import ToolSchema, build_tool_schema


class PythonProgram(NamedTuple):
    """The program that the sandbox runs for a call."""

    code: str
    stdin: str = ""


def jupyter_code(code: str) -> PythonProgram:
    """Run Python code in a notebook. Names defined in earlier calls are still there.

    Args:
        code: The Python code to run.
    """
    return PythonProgram(code)


def python_code_with_standard_io(code: str, input: str) -> PythonProgram:  # noqa: A002 - the model's name for it
    """Run a Python program of its own, with the given standard input.

    Args:
        code: The Python code to run.
        input: What the code reads from standard input.
    """
    return PythonProgram(code, input)


PYTHON_TOOLS: dict[ToolName, Callable[..., PythonProgram]] = {
    "jupyter_code": jupyter_code,
    "python_code_with_standard_io": python_code_with_standard_io,
}
TOOL_SCHEMAS: dict[ToolName, ToolSchema] = {name: build_tool_schema(tool) for name, tool in PYTHON_TOOLS.items()}


def build_program(tool: str, arguments: Mapping[str, Any]) -> PythonProgram:
    """Build the program of a call from arguments that fit the tool's schema."""
    return PYTHON_TOOLS[cast(ToolName, tool)](**arguments)

"""Labelled calls for the classification of errors: the struct, and the text of a call as a model writes it.

A call is wrong if its program does not run to its end with exit code 0 in an ordinary interpreter, if no program
starts, or if the program hides that it did not produce `wanted`. All other calls are right.
"""

import json
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import msgspec

from asterism.configs.schema.dialogue import ToolName
from benchmarks.experiments.right_programs import ONLY_PROGRAMS_RIGHT, RIGHT_PROGRAMS
from benchmarks.experiments.wrong_programs import (
    HIDDEN_FAILURES,
    HIDDEN_KIND,
    MALFORMED_CALLS,
    MALFORMED_KIND,
    ONLY_PROGRAMS_WRONG,
    WRONG_PROGRAMS,
)

NOTEBOOK: ToolName = "jupyter_code"
PROGRAM: ToolName = "python_code_with_standard_io"
STDIN = "4\n"  # standard input of every program; a program may ignore it


class LabelledProgram(msgspec.Struct, frozen=True):
    """A program with its label. `call` is the JSON text of its only call; without it, each tool runs `code`."""

    name: str
    kind: str
    code: str
    is_right: bool
    wanted: str = ""  # part of the standard output of a right program
    hides_failure: bool = False  # exit code 0, although `wanted` is missing
    tools: tuple[ToolName, ...] = (NOTEBOOK, PROGRAM)
    call: str = ""


class LabelledCall(NamedTuple):
    program: LabelledProgram
    tool: ToolName
    text: str  # text between <tool_call> and </tool_call>


def list_programs() -> list[LabelledProgram]:
    return [
        *_list_right(RIGHT_PROGRAMS, (NOTEBOOK, PROGRAM)),
        *_list_right(ONLY_PROGRAMS_RIGHT, (PROGRAM,)),
        *_list_failing(WRONG_PROGRAMS, (NOTEBOOK, PROGRAM)),
        *_list_failing(ONLY_PROGRAMS_WRONG, (PROGRAM,)),
        *(LabelledProgram(name, MALFORMED_KIND, "", False, call=call) for name, call in MALFORMED_CALLS.items()),
        *(
            LabelledProgram(name, HIDDEN_KIND, code, False, wanted, hides_failure=True)
            for name, (wanted, code) in HIDDEN_FAILURES.items()
        ),
    ]


def _list_right(
    programs: Mapping[str, Mapping[str, tuple[str, str]]], tools: tuple[ToolName, ...]
) -> Iterator[LabelledProgram]:
    for kind, by_name in programs.items():
        for name, (wanted, code) in by_name.items():
            yield LabelledProgram(name, kind, code, True, wanted, tools=tools)


def _list_failing(programs: Mapping[str, Mapping[str, str]], tools: tuple[ToolName, ...]) -> Iterator[LabelledProgram]:
    for kind, by_name in programs.items():
        for name, code in by_name.items():
            yield LabelledProgram(name, kind, code, False, tools=tools)


def list_calls(programs: list[LabelledProgram]) -> Iterator[LabelledCall]:
    """List one call for each tool of a program."""
    for program in programs:
        if program.call:
            yield LabelledCall(program, PROGRAM, program.call)
            continue
        for tool in program.tools:
            arguments = {"code": program.code} | ({"input": STDIN} if tool == PROGRAM else {})
            yield LabelledCall(program, tool, json.dumps({"name": tool, "arguments": arguments}))

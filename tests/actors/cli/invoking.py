"""Tests call `asterism` commands in their own process, without the start of Python and its imports (seconds)."""

import shlex
from pathlib import Path

import structlog
from typer.testing import CliRunner, Result

from asterism.actors.cli.main import app
from asterism.configs.errors import UnusableInput
from tests.golden_messages import check_golden_messages


def invoke(*arguments: object) -> Result:
    """Call a command with a terminal of 200 columns. Errors other than exits are in the result."""
    result = CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "200"})
    structlog.reset_defaults()  # some commands suppress logs
    return result


def read_output(*arguments: object) -> str:
    """Return the output of a command that succeeds."""
    result = invoke(*arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


def read_refusal(*arguments: object) -> str:
    """Return the error of a command that refuses its arguments or files."""
    result = invoke(*arguments)
    assert isinstance(result.exception, UnusableInput), (result.output, result.exception)
    return str(result.exception)


def check_golden_refusals(path: Path, masks: dict[str, str]) -> None:
    """Compare the errors of the command lines in a file (tests/golden_messages.py) with the messages behind them.

    `masks` has the names of texts that vary, such as a folder of the test; the command lines contain the names, too.
    """

    def run(case: str) -> None:
        for text, name in masks.items():
            case = case.replace(name, text) if name else case
        result = invoke(*shlex.split(case))
        if result.exception:
            raise result.exception

    check_golden_messages(path, run, masks)

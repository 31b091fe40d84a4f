"""Call `asterism` commands in the process of the test, which saves seconds of Python start and imports."""

import shlex
from functools import cache
from pathlib import Path

import structlog
import typer.testing
from typer.main import get_command
from typer.testing import CliRunner, Result

from asterism.actors.cli.main import app
from asterism.configs.errors import UnusableInput
from tests.golden_messages import check_golden_messages

typer.testing._get_command = cache(get_command)  # CliRunner builds all commands at each call, which takes 20 ms


def invoke(*arguments: object, typed: str = "", **environment: str) -> Result:
    """Call a command with a terminal of 200 columns and `typed` as input. The result has the exception, if any."""
    result = CliRunner().invoke(app, [*map(str, arguments)], input=typed, env={"COLUMNS": "200", **environment})
    structlog.reset_defaults()  # some commands switch logs off
    return result


def read_output(*arguments: object, typed: str = "", **environment: str) -> str:
    """Return the output of a command that succeeds."""
    result = invoke(*arguments, typed=typed, **environment)
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


def read_refusal(*arguments: object, **environment: str) -> str:
    """Return the error of a command that refuses its arguments or files."""
    result = invoke(*arguments, **environment)
    assert isinstance(result.exception, UnusableInput), (result.output, result.exception)
    return str(result.exception)


def check_golden_refusals(path: Path, masks: dict[str, str]) -> None:
    """Check that each command line in a file fails with the message behind it (tests/golden_messages.py).

    `masks` maps texts that vary, such as a folder of the test, to the names that replace them in the file.
    """

    def run(case: str) -> None:
        for text, name in masks.items():
            case = case.replace(name, text) if name else case
        result = invoke(*shlex.split(case))
        if result.exception:
            raise result.exception

    check_golden_messages(path, run, masks)

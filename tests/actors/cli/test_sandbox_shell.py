"""`asterism sandbox shell` finds the boundaries of cells and prints results."""

import asyncio
import io

import pytest

from asterism.actors.cli.sandbox_commands import run_shell
from tests.actors.cli.chat.scripted_chats import BROKEN, ScriptedSandbox
from tests.consoles import capture


def conversed(typed: str, monkeypatch: pytest.MonkeyPatch) -> tuple[ScriptedSandbox, str]:
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    notebook = ScriptedSandbox()
    return notebook, capture(lambda console: asyncio.run(run_shell(notebook, console)), width=40)


@pytest.mark.parametrize(
    ("typed", "cells"),
    [
        ("1\n2\n", ["1", "2"]),
        ("\n  \n1\n", ["1"]),
        ("for x in y:\n    x\n\n1\n", ["for x in y:\n    x\n", "1"]),
        ("def f():\n    return 1", ["def f():\n    return 1"]),  # the input ends within the cell
        ("1 +* 2\nx = (\n1)\n", ["1 +* 2", "x = (\n1)"]),  # the sandbox reports the syntax error
        ("", []),
    ],
)
def test_cells_end_as_at_pythons_prompt(typed: str, cells: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    notebook, _ = conversed(typed, monkeypatch)
    assert [call.code for call in notebook.calls] == cells
    assert [call.call for call in notebook.calls] == list(range(len(cells)))


def test_all_cells_share_one_notebook_that_ends_with_the_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    notebook, _ = conversed("1\n2\n", monkeypatch)
    assert {call.trajectory_id for call in notebook.calls} == set(notebook.ended)
    assert len(notebook.ended) == 1


def test_a_result_is_printed_verbatim(monkeypatch: pytest.MonkeyPatch) -> None:
    _, shown = conversed("x[:100:2] + '[bold]' + '[/]' + 'longer than a line'\n", monkeypatch)
    assert "\nx[:100:2] + '[bold]' + '[/]' + 'longer than a line'\n" in shown
    assert shown.endswith("(10.0 ms)\n")


def test_the_shell_continues_after_an_infrastructure_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    notebook, shown = conversed(f"{BROKEN}\n1\n", monkeypatch)
    assert "infrastructure: the server [died]\n" in shown
    assert notebook.calls[-1].code == "1"

"""A notebook that was elsewhere is made again from its cells: the same names, the same draws, unseen."""

from __future__ import annotations

import pytest

from bus.messages import CodeOk, CodeRequested, Output
from configs.schema import Sandbox as SandboxConfig
from policies.notebook import keeps_effects
from sandbox.backend import _KEPT, outcome_of  # pyright: ignore[reportPrivateUsage]
from tests.sandbox.conftest import Client, Play


def cells(*codes: str) -> tuple[CodeRequested, ...]:
    """With numbers that leave out calls whose effects the notebook does not hold."""
    return tuple(CodeRequested(5, 2 * number, "jupyter_code", code, "") for number, code in enumerate(codes))


DRAWN = "import random\nx = random.random()\nprint('unseen')"


@pytest.mark.slow
def test_a_restored_notebook_has_its_names_and_its_draws(play: Play) -> None:
    async def scenario(client: Client) -> None:
        notebook = cells(DRAWN, "y = [1]\n1 / 0", "y.append(x)")
        for cell in notebook:
            await client.sandbox.run(cell)
        asked = CodeRequested(5, 9, "jupyter_code", "print(y, random.random())", "")
        before = (await client.sandbox.run(asked)).outcome
        await client.sandbox.end_session(5)  # as if the rest were on another machine
        client.sandbox.restore_session(5, notebook)
        after = (await client.sandbox.run(asked)).outcome
        assert isinstance(before, CodeOk)
        assert after == before
        assert before.output.stdout.startswith("[1, 0.")

    play(scenario)


@pytest.mark.slow
def test_a_restored_notebook_is_ended_like_any_other(play: Play) -> None:
    async def scenario(client: Client) -> None:
        client.sandbox.restore_session(5, cells("x = 1"))
        await client.sandbox.end_session(5)
        outcome = (await client.sandbox.run(CodeRequested(5, 9, "jupyter_code", "'x' in globals()", ""))).outcome
        assert outcome == CodeOk(Output("False\n"))

    play(scenario)


@pytest.mark.parametrize("kind", ["ok", "raised", "memory", "timeout", "died"])
def test_rollouts_and_sandbox_agree_on_which_cells_a_notebook_holds(kind: str) -> None:
    details = {"raised": ["E", "E"], "died": ["-9"]}.get(kind, [])
    streams = {"stdout": "", "stderr": "", "stdout_cut": 0, "stderr_cut": 0}
    outcome = outcome_of({"kind": kind, "details": details, **streams}, SandboxConfig())
    assert keeps_effects(outcome) == (kind in _KEPT)


@pytest.mark.slow
def test_a_cell_that_was_ended_for_its_processes_memory_is_no_part_of_the_notebook(play: Play) -> None:
    hog = (
        "import os, time\nx = 'changed'\nfor _ in range(4):\n    if os.fork() == 0:\n"
        "        block = bytearray(b'x' * (60 << 20))\n        time.sleep(30)\ntime.sleep(30)"
    )

    async def scenario(client: Client) -> None:
        client.sandbox.restore_session(5, cells("x = 'kept'", hog, "y = x"))
        outcome = (await client.sandbox.run(CodeRequested(5, 9, "jupyter_code", "x, y", ""))).outcome
        assert outcome == CodeOk(Output("('kept', 'kept')\n"))

    play(scenario, memory_mib=128)

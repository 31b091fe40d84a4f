"""Cells have features of interactive Python: `_`, and `await` outside functions."""

import pytest

from asterism.bus.messages import CodeCrashed, CodeOk, CodeRaised, Output
from tests.sandbox.conftest import Client

pytestmark = [pytest.mark.slow, pytest.mark.real_clock]


async def test_the_underscore_is_the_last_shown_value(client: Client) -> None:
    failing = (await client.cell("_")).outcome
    assert isinstance(failing, CodeRaised)
    assert failing.error == "NameError: name '_' is not defined"
    await client.printed("6 * 7")
    assert await client.printed("x = 1\nNone\nprint(_)\n_ + 1") == "42\n43\n"
    assert await client.printed("print(_)") == "43\n"
    await client.printed("for _ in range(3): pass")  # a variable of the code hides `_`
    assert await client.printed("1 + 1\n_") == "2\n"


async def test_the_underscore_is_restored_by_a_rollback(client: Client) -> None:
    for code in ("6 * 7", "import os; 'later'"):
        await client.printed(code)
    await client.cell("import os; os._exit(3)")
    assert await client.printed("_") == "'later'\n"


async def test_a_program_has_no_underscore(client: Client) -> None:
    failing = (await client.program("42\n_")).outcome
    assert isinstance(failing, CodeRaised)
    assert failing.error == "NameError: name '_' is not defined"


async def test_a_cell_can_await_outside_functions(client: Client) -> None:
    await client.printed("import asyncio\nasync def double(x):\n    await asyncio.sleep(0)\n    return 2 * x")
    assert await client.printed("await double(4)") == "8\n"
    assert await client.printed("_") == "8\n"
    assert await client.printed("y = await double(5)\nprint(y)\ny + 1") == "10\n11\n"
    assert await client.printed("await asyncio.gather(double(1), double(2))") == "[2, 4]\n"
    assert await client.printed("task = asyncio.create_task(double(3))\nawait task") == "6\n"
    assert await client.printed("[await double(x) async for x in items()] if 0 else await double(1)") == "2\n"
    cell = "async with asyncio.timeout(9):\n    z = await double(6)\nz"
    assert await client.printed(cell) == "12\n"
    assert await client.printed("asyncio.run(double(7))") == "14\n"


async def test_the_traceback_of_an_awaited_error_has_only_frames_of_the_code(client: Client) -> None:
    await client.printed("async def fail():\n    raise ValueError('no')")
    failing = (await client.cell("x = 1\nawait fail()")).outcome
    assert isinstance(failing, CodeRaised)
    assert failing.traceback == (
        "Traceback (most recent call last):\n"
        '  File "<cell>", line 2, in <module>\n'
        '  File "<cell>", line 2, in fail\n'
        "ValueError: no"
    )
    ending = (await client.cell("import sys\nasync def end():\n    sys.exit(5)\nawait end()")).outcome
    assert ending == CodeCrashed(Output(), 5)
    assert await client.printed("1 + 1") == "2\n"


async def test_a_program_cannot_await_outside_functions(client: Client) -> None:
    failing = (await client.program("import asyncio\nawait asyncio.sleep(0)")).outcome
    assert isinstance(failing, CodeRaised)
    assert failing.error == "SyntaxError: 'await' outside function"


async def test_cells_with_await_print_like_other_cells(client: Client) -> None:
    code = "import asyncio\nprint('a')\nawait asyncio.sleep(0)\nNone"
    assert (await client.cell(code)).outcome == CodeOk(Output("a\n"))

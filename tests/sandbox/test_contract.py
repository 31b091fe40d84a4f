"""The contract of every backend: outcomes, limits, notebooks, order and independence of calls."""

import asyncio

import pytest

from asterism.bus import messages as msg
from asterism.sandbox.contract import SandboxFailure
from asterism.sandbox.output_scrubbing import scrub_outcome
from tests.sandbox.conftest import Client, StartSandbox, nightly_in_containers

pytestmark = [pytest.mark.slow, pytest.mark.real_clock]
LIMITS = {"time_limit_s": 0.5, "memory_mib": 128, "output_kib": 4}


async def test_a_program_reads_its_input_and_its_output_is_returned(client: Client) -> None:
    result = await client.program("import sys\nprint(input()[::-1])\nprint('oops', file=sys.stderr)", "abc\n")
    assert result.outcome == msg.CodeOk(msg.Output("cba\n", "oops\n"))
    assert result.duration_s > 0


async def test_a_notebook_keeps_its_variables_and_prints_the_last_value(client: Client) -> None:
    assert await client.printed("x = 'a'") == ""
    assert await client.printed("x * 2") == "'aa'\n"
    assert await client.printed("print(x)\nNone") == "a\n"
    other = (await client.cell("x", trajectory=1)).outcome
    assert isinstance(other, msg.CodeRaised)


async def test_a_traceback_contains_no_frames_of_the_harness(client: Client) -> None:
    outcome = (await client.cell("print(gcd(12, 18))")).outcome
    assert outcome == msg.CodeRaised(
        msg.Output(),
        "NameError: name 'gcd' is not defined",
        'Traceback (most recent call last):\n  File "<cell>", line 1, in <module>\n'
        "NameError: name 'gcd' is not defined",
    )
    assert isinstance((await client.program("print((")).outcome, msg.CodeRaised)
    outcome = (await client.program("def f():\n    return 1 / 0\nprint('before')\nf()")).outcome
    assert outcome == msg.CodeRaised(
        msg.Output("before\n"),
        "ZeroDivisionError: division by zero",
        'Traceback (most recent call last):\n  File "<program>", line 4, in <module>\n'
        '  File "<program>", line 2, in f\nZeroDivisionError: division by zero',
    )


async def test_invalid_unicode_is_escaped_and_code_over_the_limit_is_refused(client: Client) -> None:
    outcome = (await client.program("import sys\nsys.stdout.buffer.write(b'a\\xff\\x00b')")).outcome
    assert outcome == msg.CodeOk(msg.Output("a\\xff\x00b"))
    outcome = (await client.program("print('\\ud800')\nraise ValueError('\\ud800\\0')")).outcome
    assert isinstance(outcome, msg.CodeRaised)
    assert (outcome.output.stdout, outcome.error) == ("\\ud800\n", "ValueError: \\ud800\\x00")
    assert isinstance((await client.program("#" * 2_000_000)).outcome, msg.CodeRefused)


async def test_every_kind_of_exit_has_its_outcome(client: Client) -> None:

    async def run(code: str) -> object:
        return (await client.program(code)).outcome

    assert await run("print(1, end='')\nexit()") == msg.CodeOk(msg.Output("1"))
    assert await run("import sys; sys.exit(3)") == msg.CodeCrashed(msg.Output(), 3)
    assert await run("import sys; sys.exit('why')") == msg.CodeCrashed(msg.Output("", "why\n"), 1)
    assert await run("import os; print('x', flush=True); os._exit(0)") == msg.CodeCrashed(msg.Output("x\n"), 0)
    assert await run("import ctypes; ctypes.string_at(0)") == msg.CodeCrashed(msg.Output(), -11)
    assert await run("x = bytearray(1 << 30)") == msg.CodeOutOfMemory(msg.Output(), 128)
    assert await run("print('on the way')\nwhile True: pass") == msg.CodeTimedOut(msg.Output("on the way\n"), 0.5)
    assert await run("import time; time.sleep(60)") == msg.CodeTimedOut(msg.Output(), 0.5)
    assert await run("import atexit; atexit.register(print, 'bye')") == msg.CodeOk(msg.Output("bye\n"))


async def test_a_program_that_forks_has_one_outcome(client: Client) -> None:
    code = "import os\nif os.fork():\n    os.wait()\n    print('parent')\nelse:\n    print('child')\n    1 / 0"
    outcome = (await client.program(code)).outcome
    assert isinstance(outcome, msg.CodeOk)
    assert outcome.output.stdout == "child\nparent\n"
    assert outcome.output.stderr.endswith("ZeroDivisionError: division by zero\n")


async def test_output_beyond_the_limit_is_drained_and_counted(client: Client) -> None:
    outcome = (await client.program("import sys\nprint('x' * 2_000_000)\nprint('e', file=sys.stderr)")).outcome
    assert outcome == msg.CodeOk(msg.Output("x" * 4096, "e\n", 2_000_001 - 4096, 0))
    # A character has three bytes, so the limit of 4096 bytes cuts a character.
    outcome = (await client.program("print('\\u20ac' * 5000)")).outcome
    assert outcome == msg.CodeOk(msg.Output("\u20ac" * 1365, "", 15_001 - 4096, 0))


async def test_cells_of_one_notebook_run_in_the_order_of_their_requests(client: Client) -> None:
    await client.printed("seen = []")
    await asyncio.gather(*[client.printed(f"seen.append({number})") for number in range(50)])
    assert await client.printed("seen == list(range(50))") == "True\n"


async def test_the_end_of_a_notebook_deletes_its_state_and_stops_its_running_cell(client: Client) -> None:
    await client.printed("x = 1")
    running = asyncio.create_task(client.cell("import time; time.sleep(60)"))
    await asyncio.sleep(0)
    await client.end()
    with pytest.raises(SandboxFailure, match="the trajectory ended"):
        await running
    assert isinstance((await client.cell("x")).outcome, msg.CodeRaised)


async def test_random_draws_scrubbed_addresses_and_timeouts_are_the_same_in_every_run(
    start_sandbox: StartSandbox,
) -> None:
    draw = (
        "import random, numpy\n"
        "print(random.random(), numpy.random.rand(), numpy.random.default_rng().random(), {'a', 'b', 'c'})"
    )
    runs: list[list[msg.CodeOutcome]] = []
    for _ in range(2):
        async with start_sandbox(time_limit_s=0.3) as client:
            draws = [(await client.program(draw, trajectory=trajectory)).outcome for trajectory in (1, 1, 2)]
            results = [
                await client.cell("print(map(str, []), object())\nlambda: 0"),
                await client.program("raise ValueError(object())"),
                await client.program("n = 0\nwhile True:\n    n += 1\n    print(n)"),
            ]
            assert "at 0x" in str(results[0].outcome)
            runs.append([*draws, *(scrub_outcome(result.outcome) for result in results)])
    assert runs[0] == runs[1]
    assert [type(outcome) for outcome in runs[0]] == [*[msg.CodeOk] * 4, msg.CodeRaised, msg.CodeTimedOut]
    assert len({str(outcome) for outcome in runs[0][:3]}) == 3  # each call of each trajectory has its own draws


@nightly_in_containers
async def test_slow_calls_do_not_delay_other_calls(start_sandbox: StartSandbox) -> None:
    """The fast calls end while 64 slow calls occupy all slots."""
    async with start_sandbox(time_limit_s=500) as client:
        slow = [asyncio.create_task(client.program("import time; time.sleep(600)")) for _ in range(64)]
        fast = await asyncio.gather(*[client.program(f"print({number})") for number in range(50)])
        assert [result.outcome for result in fast] == [msg.CodeOk(msg.Output(f"{number}\n")) for number in range(50)]
        assert not any(task.done() for task in slow)
        for task in slow:
            task.cancel()
        assert all(
            isinstance(error, asyncio.CancelledError) for error in await asyncio.gather(*slow, return_exceptions=True)
        )


@nightly_in_containers
async def test_the_time_limit_counts_from_the_start_of_a_call_without_queueing(client: Client) -> None:
    """200 calls of 0.25 s share little more than 64 slots, so that the last call waits longer than 0.5 s."""
    results = await asyncio.gather(*[client.program("import time; time.sleep(0.25)") for _ in range(200)])
    assert {type(result.outcome) for result in results} == {msg.CodeOk}


async def test_a_full_queue_refuses_calls_with_a_failure(start_sandbox: StartSandbox) -> None:
    async with start_sandbox(time_limit_s=500, max_queued_calls=1) as client:
        first = asyncio.create_task(client.program("import time; time.sleep(600)"))
        await asyncio.sleep(0)
        with pytest.raises(SandboxFailure, match="queue of calls is full"):
            await client.program("print(1)")
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        assert isinstance((await client.program("print(1)")).outcome, msg.CodeOk)

"""Reward functions run in a process of their own; every call has one answer, even if a function fails."""

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from asterism.bus.messages import AnswerSubmitted, RewardInput, ids_to_bytes
from asterism.configs.schema.tasks import RewardConfig
from asterism.sandbox.contract import Grade, Sandbox, SandboxFailure
from asterism.tasks.hosting.answer_scorer import AnswerScorer
from asterism.tasks.hosting.host_pool import HostPool
from asterism.tasks.hosting.host_process import HostFailure
from asterism.tasks.hosting.wire import HostSettings
from asterism.tasks.math_python import MATH_PYTHON
from tests.processes import family
from tests.tasks.hosting.hosts import open_pool

pytestmark = [pytest.mark.slow, pytest.mark.real_clock]

FUNCTIONS = """
import asyncio, os, re, sys, time

def do(action, completions, **_):
    match action[0]:
        case "raise": raise ValueError("boom")
        case "exit": sys.exit(3)
        case "die": os._exit(9)
        case "own timeout": raise TimeoutError("the judge")
        case "hold": re.match(r"(a+)+$", "a" * 64 + "b")  # keeps the interpreter's lock
        case "close": os.closerange(3, 64); time.sleep(3600)
        case "hang": time.sleep(3600)
        case "print": print("x" * 100_000); sys.stderr.write("y" * 100_000)
        case "huge": return [[1.0] * 10_000_000]
        case "none": return [None]
    return [0.5]

async def wait(action, completions, **_):
    started.add(len(started))
    while len(started) < 20 and action[0] == "together":
        await asyncio.sleep(0.01)
    return [float(len(started))]

started = set()

def alone(completions):
    started.add(object())
    time.sleep(0.002)  # another call would start
    return [float(len(started)), started.clear()][:1]

def slow(completions):
    time.sleep(0.15)
    return [0.0]

def odd(action, completions, log_metric):
    if action[0] == "raise":
        raise ValueError("a\\udcffb")
    if action[0] == "metric":
        log_metric("a\\udcffb", 1.0)
    return [0.5]
"""


def submit(action: str, trajectory_id: int = 0, ending: str = "answered") -> AnswerSubmitted:
    row = b'{"question": "a?", "ground_truth": "5", "action": "%s"}' % action.encode()
    tokens = RewardInput(ending, row, 2, ids_to_bytes([1, 2, 3, 4]), bytes([0, 0, 1, 1]))  # pyright: ignore[reportArgumentType]
    return AnswerSubmitted(trajectory_id, "5", "5", tokens)


def open_functions(checkpoint: Path, *names: str, time_limit_s: float = 60.0) -> AbstractAsyncContextManager[HostPool]:
    (checkpoint / "rewards.py").write_text(FUNCTIONS)
    functions = {name: f"{checkpoint}/rewards.py:{name}" for name in names or ["do"]}
    limits: dict[str, Any] = {"call_limit_s": time_limit_s, "reward_limit_s": time_limit_s}
    return open_pool(HostSettings(functions=functions, checkpoint=str(checkpoint), **limits))


async def describe(pool: HostPool, action: str) -> object:
    """Score the action, and return the components of its reward or the cause of the failure."""
    try:
        return (await pool.score(submit(action))).components
    except HostFailure as error:
        return str(error)


@pytest.fixture(scope="module")
def pool(checkpoint: Path, loop: asyncio.Runner) -> Iterator[HostPool]:
    """Open a pool of the function `do` for all tests that need no other."""
    context = open_functions(checkpoint)
    yield loop.run(context.__aenter__())
    loop.run(context.__aexit__(None, None, None))


async def test_each_call_has_its_own_result(pool: HostPool) -> None:
    actions = ["fine", "raise", "exit", "print", "huge", "none", *["fine"] * 50]
    raised, exited, printed, huge, none, *fine = (
        await asyncio.gather(*[describe(pool, action) for action in actions])
    )[1:]
    assert (raised, exited) == ("do raised ValueError: boom", "do raised SystemExit: 3")
    assert (printed, none) == ({"do": 0.5}, {})
    assert str(huge).startswith("do returned [1.0, 1.0")
    assert fine == [{"do": 0.5}] * 50


async def test_calls_of_async_functions_overlap(checkpoint: Path) -> None:
    async with open_functions(checkpoint, "wait") as pool:
        assert await asyncio.gather(*[describe(pool, "together") for _ in range(20)]) == [{"wait": 20.0}] * 20


async def test_a_function_that_hangs_fails_only_its_own_call(checkpoint: Path) -> None:
    async with open_functions(checkpoint, time_limit_s=1.0) as pool:
        found = await asyncio.gather(*[describe(pool, action) for action in ("fine", "hang", "fine", "fine")])
        assert found == [{"do": 0.5}, "do took longer than 1 s", {"do": 0.5}, {"do": 0.5}]


async def test_other_calls_continue_in_the_next_process_after_a_hang(checkpoint: Path) -> None:
    async with open_functions(checkpoint, time_limit_s=2.0) as pool:
        assert await describe(pool, "fine") == {"do": 0.5}
        before = pool.pids
        calls = [asyncio.create_task(describe(pool, action)) for action in ("hang", *["fine"] * 30)]
        assert await asyncio.gather(*calls) == ["do took longer than 2 s", *[{"do": 0.5}] * 30]
        assert set(pool.pids).isdisjoint(before)


async def test_sync_functions_run_one_at_a_time(checkpoint: Path) -> None:
    async with open_functions(checkpoint, "alone") as pool:
        assert await asyncio.gather(*[describe(pool, "fine") for _ in range(20)]) == [{"alone": 1.0}] * 20


async def test_a_process_with_many_slow_calls_of_several_functions_is_not_killed(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No call gets an answer for 1.8 s, because the first functions of all calls precede the second functions."""
    monkeypatch.setattr("asterism.tasks.hosting.host_process._HANG_S", 0.25)
    monkeypatch.setattr("asterism.tasks.hosting.host_process._START_LIMIT_S", 60.0)
    async with open_functions(checkpoint, "slow", "do", time_limit_s=1.0) as pool:
        found = await asyncio.gather(*[describe(pool, "fine") for _ in range(12)])
        assert found == [{"slow": 0.0, "do": 0.5}] * 12


async def test_a_call_is_answered_despite_names_and_texts_that_utf_8_cannot_encode(checkpoint: Path) -> None:
    async with open_functions(checkpoint, "odd") as pool:
        assert await describe(pool, "raise") == "odd raised ValueError: a?b"
        assert str(await describe(pool, "metric")).startswith("UnicodeEncodeError: ")
        assert await describe(pool, "fine") == {"odd": 0.5}


async def test_a_process_that_dies_is_replaced_and_its_calls_are_repeated_once(pool: HostPool) -> None:
    assert await describe(pool, "fine") == {"do": 0.5}
    (worker,) = pool.pids
    assert worker in family(os.getpid())
    os.kill(worker, signal.SIGKILL)
    assert await describe(pool, "fine") == {"do": 0.5}
    assert await describe(pool, "die") == "the process of the rewards died with exit code 9"
    assert await describe(pool, "fine") == {"do": 0.5}


async def test_a_timeout_error_of_a_function_is_an_error_and_no_timeout(pool: HostPool) -> None:
    assert await describe(pool, "own timeout") == "do raised TimeoutError: the judge"
    pids = pool.pids
    assert await describe(pool, "fine") == {"do": 0.5}
    assert pool.pids == pids


async def test_a_process_that_closes_its_socket_is_replaced(pool: HostPool) -> None:
    assert await describe(pool, "close") == "the process of the rewards died with exit code -9"
    assert await describe(pool, "fine") == {"do": 0.5}


async def test_a_process_that_hangs_is_killed_although_calls_arrive(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_functions(checkpoint, time_limit_s=1.0) as pool:
        assert await describe(pool, "fine") == {"do": 0.5}
        monkeypatch.setattr("asterism.tasks.hosting.host_process._HANG_S", 0.5)
        held = asyncio.create_task(describe(pool, "hold"))
        others: list[asyncio.Task[object]] = []
        while not held.done():
            others.append(asyncio.create_task(describe(pool, "fine")))
            await asyncio.sleep(0.05)
        assert str(await held).startswith("the process of the rewards died with exit code -9")
        await asyncio.gather(*others)
        assert await describe(pool, "fine") == {"do": 0.5}


async def test_a_cancelled_call_does_not_cancel_other_calls(pool: HostPool) -> None:
    cancelled = asyncio.create_task(describe(pool, "fine"))
    others = [asyncio.create_task(describe(pool, "fine")) for _ in range(3)]
    await asyncio.sleep(0)
    cancelled.cancel()
    assert await asyncio.gather(*others) == [{"do": 0.5}] * 3


class GradingSandbox:
    """A sandbox that only grades."""

    async def grade(self, submission: AnswerSubmitted) -> Grade:
        if submission.answer == "broken":
            raise SandboxFailure("gone")
        return Grade(submission.answer == submission.ground_truth, 0.25)


async def test_the_reward_is_the_weighted_sum_of_the_grader_and_the_functions(pool: HostPool) -> None:
    functions = {"correct": "math", "do": "rewards.py:do"}
    config = RewardConfig(functions=functions, weights={"do": -0.5})
    sandbox: Sandbox = GradingSandbox()  # pyright: ignore[reportAssignmentType]
    scorer = AnswerScorer(sandbox, config, MATH_PYTHON, pool)
    assert (await scorer.score(submit("fine")))[:2] == (0.75, {"correct": 1.0, "do": 0.5})
    assert (await scorer.score(submit("none")))[:2] == (1.0, {"correct": 1.0})
    assert (await scorer.score(submit("fine", ending="length")))[:2] == (-0.25, {"correct": 0.0, "do": 0.5})
    only = AnswerScorer(sandbox, RewardConfig(functions={"do": functions["do"]}), MATH_PYTHON, pool)
    with pytest.raises(HostFailure, match="no reward function scored the trajectory"):
        await only.score(submit("none"))


async def test_without_functions_the_reward_is_the_graders_verdict() -> None:
    sandbox: Sandbox = GradingSandbox()  # pyright: ignore[reportAssignmentType]
    scorer = AnswerScorer(sandbox, RewardConfig(), MATH_PYTHON)
    assert await scorer.score(AnswerSubmitted(0, "5", "5")) == (1.0, {"correct": 1.0}, 0.25)
    assert await scorer.score(AnswerSubmitted(0, "4", "5")) == (0.0, {"correct": 0.0}, 0.25)
    with pytest.raises(SandboxFailure):
        await scorer.score(AnswerSubmitted(0, "broken", "5"))

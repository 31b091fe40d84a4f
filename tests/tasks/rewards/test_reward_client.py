"""The process of reward functions: every call is answered once, whatever a function does."""

import asyncio
import os
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tasks.rewards.reward_client import RewardClient, RewardFailure

from bus.messages import AnswerSubmitted, RewardInput, ids_to_bytes
from configs.task_options import RewardConfig
from sandbox.contract import Grade, Sandbox, SandboxFailure
from tasks.hosting.answer_scorer import AnswerScorer
from tasks.rewards.reward_functions import RewardSettings
from tasks.tiny.cold_start_dialogues import generate_dialogues
from tasks.tiny.prepare import iter_tokenizer_texts
from tasks.tiny.tiny_tokenizer import save_tokenizer, train_tokenizer
from tests.processes import family

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
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    save_tokenizer(train_tokenizer(iter_tokenizer_texts(generate_dialogues(0, 50, 200))), folder)
    (folder / "rewards.py").write_text(FUNCTIONS)
    return folder


def submit(action: str, trajectory_id: int = 0, ending: str = "answered") -> AnswerSubmitted:
    row = b'{"question": "a?", "ground_truth": "5", "action": "%s"}' % action.encode()
    tokens = RewardInput(ending, row, 2, ids_to_bytes([1, 2, 3, 4]), bytes([0, 0, 1, 1]))  # pyright: ignore[reportArgumentType]
    return AnswerSubmitted(trajectory_id, "5", "5", tokens)


@asynccontextmanager
async def open_client(checkpoint: Path, name: str = "do", time_limit_s: float = 60.0) -> AsyncGenerator[RewardClient]:
    functions = {name: f"{checkpoint}/rewards.py:{name}"}
    client = RewardClient(RewardSettings(functions, str(checkpoint), time_limit_s))
    try:
        yield client
    finally:
        pid = client.pid
        await client.close()
        assert pid not in family(os.getpid())


async def describe(client: RewardClient, action: str) -> object:
    try:
        return await client.score(submit(action))
    except RewardFailure as error:
        return str(error)


async def test_each_call_has_its_own_result(checkpoint: Path) -> None:
    async with open_client(checkpoint) as client:
        actions = ["fine", "raise", "exit", "print", "huge", "none", *["fine"] * 50]
        raised, exited, printed, huge, none, *fine = (
            await asyncio.gather(*[describe(client, action) for action in actions])
        )[1:]
        assert (raised, exited) == ("do raised ValueError: boom", "do raised SystemExit: 3")
        assert (printed, none) == ({"do": 0.5}, {})
        assert str(huge).startswith("do returned [1.0, 1.0")
        assert fine == [{"do": 0.5}] * 50


async def test_calls_of_async_functions_overlap(checkpoint: Path) -> None:
    async with open_client(checkpoint, "wait") as client:
        assert await asyncio.gather(*[describe(client, "together") for _ in range(20)]) == [{"wait": 20.0}] * 20


async def test_a_function_that_hangs_fails_only_its_own_call(checkpoint: Path) -> None:
    async with open_client(checkpoint, time_limit_s=0.3) as client:
        found = await asyncio.gather(*[describe(client, action) for action in ("fine", "hang", "fine", "fine")])
        assert found == [{"do": 0.5}, "do took longer than 0.3 s", {"do": 0.5}, {"do": 0.5}]


async def test_a_process_that_dies_is_replaced_and_its_calls_are_repeated_once(checkpoint: Path) -> None:
    async with open_client(checkpoint) as client:
        assert await describe(client, "fine") == {"do": 0.5}
        assert client.pid is not None
        (worker,) = [pid for pid in family(os.getpid()) if pid == client.pid]
        os.kill(worker, signal.SIGKILL)
        assert await describe(client, "fine") == {"do": 0.5}
        assert await describe(client, "die") == "the process of the reward functions died with exit code 9"
        assert await describe(client, "fine") == {"do": 0.5}


async def test_a_timeout_of_the_functions_own_is_its_error(checkpoint: Path) -> None:
    async with open_client(checkpoint) as client:
        assert await describe(client, "own timeout") == "do raised TimeoutError: the judge"
        pid = client.pid
        assert await describe(client, "fine") == {"do": 0.5}
        assert client.pid == pid


async def test_a_process_that_closes_its_socket_is_replaced(checkpoint: Path) -> None:
    async with open_client(checkpoint) as client:
        assert await describe(client, "close") == "the process of the reward functions died with exit code -9"
        assert await describe(client, "fine") == {"do": 0.5}


async def test_a_process_that_hangs_is_killed_although_calls_arrive(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_client(checkpoint, time_limit_s=0.1) as client:
        assert await describe(client, "fine") == {"do": 0.5}
        monkeypatch.setattr("tasks.rewards.reward_client._HANG_S", 1.0)
        held = asyncio.create_task(describe(client, "hold"))
        others: list[asyncio.Task[object]] = []
        while not held.done():
            others.append(asyncio.create_task(describe(client, "fine")))
            await asyncio.sleep(0.05)
        assert str(await held).startswith("the process of the reward functions died with exit code -9")
        await asyncio.gather(*others)
        assert await describe(client, "fine") == {"do": 0.5}


async def test_a_cancelled_call_leaves_the_others(checkpoint: Path) -> None:
    async with open_client(checkpoint) as client:
        cancelled = asyncio.create_task(describe(client, "fine"))
        others = [asyncio.create_task(describe(client, "fine")) for _ in range(3)]
        await asyncio.sleep(0)
        cancelled.cancel()
        assert await asyncio.gather(*others) == [{"do": 0.5}] * 3


class GradingSandbox:
    """Grades only."""

    async def grade(self, submission: AnswerSubmitted) -> Grade:
        if submission.answer == "broken":
            raise SandboxFailure("gone")
        return Grade(submission.answer == submission.ground_truth, 0.25)


async def test_the_reward_is_the_weighted_sum_of_the_grader_and_the_functions(checkpoint: Path) -> None:
    functions = {"correct": "math", "do": f"{checkpoint}/rewards.py:do"}
    config = RewardConfig(functions=functions, weights={"do": -0.5})
    sandbox: Sandbox = GradingSandbox()  # pyright: ignore[reportAssignmentType]
    scorer = AnswerScorer(sandbox, config, checkpoint=str(checkpoint))
    try:
        assert (await scorer.score(submit("fine")))[:2] == (0.75, {"correct": 1.0, "do": 0.5})
        assert (await scorer.score(submit("none")))[:2] == (1.0, {"correct": 1.0})
        assert (await scorer.score(submit("fine", ending="length")))[:2] == (-0.25, {"correct": 0.0, "do": 0.5})
    finally:
        await scorer.close()
    only = AnswerScorer(sandbox, RewardConfig(functions={"do": functions["do"]}), checkpoint=str(checkpoint))
    try:
        with pytest.raises(RewardFailure, match="no reward function scored the trajectory"):
            await only.score(submit("none"))
    finally:
        await only.close()


async def test_without_functions_the_reward_is_the_graders_verdict() -> None:
    sandbox: Sandbox = GradingSandbox()  # pyright: ignore[reportAssignmentType]
    scorer = AnswerScorer(sandbox)
    assert await scorer.score(AnswerSubmitted(0, "5", "5")) == (1.0, {"correct": 1.0}, 0.25)
    assert await scorer.score(AnswerSubmitted(0, "4", "5")) == (0.0, {"correct": 0.0}, 0.25)
    with pytest.raises(SandboxFailure):
        await scorer.score(AnswerSubmitted(0, "broken", "5"))

"""Pools of host processes for tests: the task's source, its calls, and the journal that its code writes."""

import asyncio
import os
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asterism.bus import messages as msg
from asterism.engine.hf.tokenizer import load_tokenizer
from asterism.policies.tools.task_description import TaskDescription
from asterism.tasks.hosting.host_pool import HostPool
from asterism.tasks.hosting.host_process import HostCommand, HostFailure, RunProgramFunction
from asterism.tasks.hosting.loaded_task import LoadedTask
from asterism.tasks.hosting.wire import HostSettings, ProgramEnded, RunProgram
from asterism.tasks.math_python import MATH_PYTHON
from tests.processes import family

# The head of every task's source. `note` writes a line to the journal; `wait_for` waits for a file of the test; `tool`
# writes the docstring of a tool.
HEAD = """
import asyncio, os, sys, threading, time
from pathlib import Path
FOLDER = Path(__file__).parent

def note(*words):
    with open(FOLDER / "journal", "a") as file:
        file.write(" ".join(map(str, words)) + "\\n")

def wait_for(name):
    while not (FOLDER / name).exists():
        time.sleep(0.01)

def tool(function):
    names = [name for name in function.__annotations__ if name != "return"]
    function.__doc__ = "Do it.\\n\\nArgs:\\n" + "".join(f"    {name}: It.\\n" for name in names)
    return function
"""


async def refuse_programs(request: RunProgram) -> ProgramEnded:
    raise AssertionError(f"unexpected program: {request.code}")


@dataclass
class Host:
    """A pool of one task, and the folder of its source."""

    pool: HostPool
    folder: Path

    def read_journal(self) -> list[str]:
        path = self.folder / "journal"
        return path.read_text().splitlines() if path.exists() else []

    def release(self, name: str) -> None:
        """Let `wait_for(name)` in the task's code return."""
        (self.folder / name).touch()

    async def open(self, trajectory_id: int = 0, /, **row: Any) -> str:
        """Open a new instance, and return its first observation."""
        request = msg.EnvironmentCalled(trajectory_id, msg.OPENING_CALL, "t", "", msgspec.json.encode(row))
        outcome = (await self.pool.call(request)).outcome
        assert isinstance(outcome, msg.Observation)
        return outcome.content

    async def call(self, method: str, trajectory_id: int = 0, /, **arguments: Any) -> msg.EnvironmentOutcome:
        request = msg.EnvironmentCalled(trajectory_id, 0, "t", method, msgspec.json.encode(arguments))
        return (await self.pool.call(request)).outcome

    async def read(self, method: str, trajectory_id: int = 0, /, **arguments: Any) -> str:
        """Make a call, and return the text for the model: an observation, or an error."""
        outcome = await self.call(method, trajectory_id, **arguments)
        assert isinstance(outcome, msg.Observation | msg.EnvironmentRaised), outcome
        return outcome.content if isinstance(outcome, msg.Observation) else outcome.error

    async def step(self, content: str, trajectory_id: int = 0) -> msg.Observation:
        outcome = await self.call("step", trajectory_id, role="assistant", content=content)
        assert isinstance(outcome, msg.Observation)
        return outcome

    async def score(self, trajectory_id: int = 0) -> dict[str, float]:
        """Return the components of `get_reward`."""
        return (await self.pool.score(msg.AnswerSubmitted(trajectory_id, "", "", None, "t"))).environment


def submit(
    checkpoint: Path, row: dict[str, object], response: str, task: str = "t", trajectory_id: int = 1
) -> msg.AnswerSubmitted:
    ids = load_tokenizer(checkpoint).encode(response, trusted=False)
    tokens = msg.RewardInput("answered", msgspec.json.encode(row), 0, msg.ids_to_bytes(ids), bytes([1]) * len(ids))
    return msg.AnswerSubmitted(trajectory_id, "", "", tokens, task)


@asynccontextmanager
async def open_pool(
    settings: HostSettings,
    description: TaskDescription = MATH_PYTHON,
    *,
    run_program: RunProgramFunction = refuse_programs,
    processes: int = 1,
    python: str = "",
    variables: dict[str, str] | None = None,
) -> AsyncGenerator[HostPool]:
    """Open a pool, and check that no process remains at the end."""
    pool = HostPool(HostCommand(settings, python, variables or {}), description, run_program, processes=processes)
    try:
        yield pool
    finally:
        pids = pool.pids
        await pool.close()
        assert set(pids).isdisjoint(family(os.getpid()))


POOL_OPTIONS = ("run_program", "processes", "python", "variables")


@asynccontextmanager
async def open_host(folder: Path, source: str, name: str, **options: Any) -> AsyncGenerator[Host]:
    """Open a host for the object `name` of the source. `options` are options of `open_pool` or settings of the host."""
    (folder / "task.py").write_text(HEAD + source)
    settings = {key: value for key, value in options.items() if key not in POOL_OPTIONS}
    made = HostSettings(task="t", import_path=f"{folder}/task.py:{name}", **settings)
    of_pool = {key: value for key, value in options.items() if key in POOL_OPTIONS}
    async with open_pool(made, await LoadedTask(made).describe(), **of_pool) as pool:
        yield Host(pool, folder)


async def fail(awaitable: Awaitable[object]) -> str:
    """Await a call that must fail, and return the cause of its failure."""
    with pytest.raises(HostFailure) as failure:
        await awaitable
    return str(failure.value)


async def until(condition: Callable[[], bool]) -> None:
    """Wait until the condition is true, which another process changes."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.01)

"""Fixtures of the sandbox's tests: a sandbox of each backend, and a client for it."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from asterism.bus.messages import AnswerSubmitted, CodeOk, CodeOutcome, CodeRequested
from asterism.configs.schema.machines import SandboxConfig as SandboxConfig
from asterism.sandbox.contract import CodeResult, Grade, Isolation, SandboxFailure
from asterism.sandbox.fork_server_sandbox import ForkServerSandbox
from asterism.sandbox.select_backend import make_sandbox
from tests.processes import family, is_running

PATIENCE = 40.0  # max_call_extension in tests, so that load on the machine changes no outcome
PARAMETERS = ["process", pytest.param("docker", marks=[pytest.mark.docker, pytest.mark.slow])]
# Marks a test of code that is the same on every host: `make test` runs the test only with processes.
nightly_in_containers = pytest.mark.nightly_in_containers
_FIRST_TRAJECTORIES = itertools.count(0, 10_000)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("nightly_in_containers") and item.get_closest_marker("docker"):
            item.add_marker(pytest.mark.nightly)


class Client:
    """A client of one running sandbox. It numbers the calls of each trajectory; trajectory ids begin at `first`."""

    def __init__(self, sandbox: ForkServerSandbox, isolation: Isolation, first: int = 0) -> None:
        self.sandbox = sandbox
        self.isolation = isolation
        self._first = first
        self._calls: dict[int, int] = {}

    def _request(self, tool: Any, code: str, stdin: str, trajectory: int) -> CodeRequested:
        self._calls[trajectory] = number = self._calls.get(trajectory, -1) + 1
        return CodeRequested(self._first + trajectory, number, tool, code, stdin)

    async def program(self, code: str, stdin: str = "", trajectory: int = 0) -> CodeResult:
        return await self.sandbox.run(self._request("python_code_with_standard_io", code, stdin, trajectory))

    async def cell(self, code: str, trajectory: int = 0) -> CodeResult:
        return await self.sandbox.run(self._request("jupyter_code", code, "", trajectory))

    async def printed(self, code: str, trajectory: int = 0) -> str:
        """Return the output of a cell, which must succeed."""
        outcome = (await self.cell(code, trajectory)).outcome
        assert isinstance(outcome, CodeOk), outcome
        return outcome.output.stdout

    async def grade(self, answer: str, truth: str) -> Grade:
        return await self.sandbox.grade(AnswerSubmitted(0, answer, truth))

    async def end(self, trajectory: int = 0) -> None:
        await self.sandbox.end_notebook(self._first + trajectory)

    async def end_all(self) -> None:
        for trajectory in self._calls:
            await self.end(trajectory)


StartSandbox = Callable[..., AbstractAsyncContextManager[Client]]


@asynccontextmanager
async def open_sandbox(backend: Any, test_limit_s: float | None = 120, **limits: Any) -> AsyncGenerator[Client]:
    limits = {"max_call_extension": PATIENCE, **limits}
    sandbox = make_sandbox(SandboxConfig(backend=backend, **limits), seed=7)
    try:
        client = Client(sandbox, await sandbox.start())
        async with asyncio.timeout(test_limit_s):
            yield client
        started = family(*sandbox.server_pids)
    finally:
        await sandbox.close()
    assert started, "the sandbox has no processes"
    assert [pid for pid in started if is_running(pid)] == []


@pytest.fixture(params=PARAMETERS)
def start_sandbox(request: pytest.FixtureRequest) -> StartSandbox:
    """`async with start_sandbox(**limits) as client` starts a fresh sandbox and checks that no process is left.

    Raises TimeoutError after `test_limit_s`.
    """
    return partial(open_sandbox, request.param)


@pytest.fixture(scope="module", params=PARAMETERS)
def shared_client(request: pytest.FixtureRequest, loop: asyncio.Runner) -> Iterator[Client]:
    """Start a sandbox with the file's LIMITS for all tests of the file that use `client`."""
    context = open_sandbox(request.param, None, **getattr(request.module, "LIMITS", {}))
    yield loop.run(context.__aenter__())
    loop.run(context.__aexit__(None, None, None))


def lend(shared: Client, loop: asyncio.Runner) -> Iterator[Client]:
    """Yield a client of the sandbox with separate trajectories, and end their notebooks."""
    client = Client(shared.sandbox, shared.isolation, next(_FIRST_TRAJECTORIES))
    yield client
    loop.run(client.end_all())


@pytest.fixture
def client(shared_client: Client, loop: asyncio.Runner) -> Iterator[Client]:
    yield from lend(shared_client, loop)


async def wait_for_outcome(client: Client) -> CodeOutcome:
    """Return the first outcome of a recovering sandbox; ignore infrastructure failures before it."""
    while True:
        with contextlib.suppress(SandboxFailure):
            return (await client.program("print(6 * 7)", trajectory=99)).outcome


def get_text(result: CodeResult) -> str | CodeOutcome:
    """Return the standard output of a successful call, or else its outcome."""
    return result.outcome.output.stdout if isinstance(result.outcome, CodeOk) else result.outcome


def list_call_cgroups(server_pids: Sequence[int]) -> list[Path]:
    parents: set[Path] = set()
    for pid in server_pids:
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            mount = "/sys/fs/cgroup" + ("" if number == "0" else f"/{controllers}")
            if controllers in ("", "memory") and path.endswith("/server"):
                parents.add(Path(mount + path).parent)
    return [cgroup for parent in parents for cgroup in parent.glob("call-*")]

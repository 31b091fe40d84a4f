"""The arenas: one sandbox of each kind, shared by all hostile programs."""

import asyncio
import contextlib
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.sandbox.hostile.arena import Arena
from tests.sandbox.hostile.public_interpreter import public_interpreter

ARENAS = {
    "process": ("process", "auto"),
    "docker": ("docker", "auto"),
    "process-without-namespaces": ("process", "off"),
}
PARAMETERS = [
    "process",
    pytest.param("docker", marks=pytest.mark.docker),
    pytest.param("process-without-namespaces", marks=pytest.mark.nightly),
]


@contextlib.contextmanager
def open_arenas(name: str, folder: Path, *time_limits_s: float) -> Generator[list[Arena]]:
    backend, namespaces = ARENAS[name]
    arenas: list[Arena] = []
    with contextlib.ExitStack() as stack:
        runner = stack.enter_context(asyncio.Runner())
        if namespaces == "off":
            stack.enter_context(public_interpreter())
        for time_limit_s in time_limits_s:
            arenas.append(Arena(runner, backend, namespaces, time_limit_s, folder))
            stack.callback(arenas[-1].close)
            arenas[-1].open()
        for arena in arenas:
            arena.record_state()
        yield arenas


@pytest.fixture(scope="module", params=PARAMETERS)
def arena(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arena]:
    with open_arenas(request.param, tmp_path_factory.mktemp("executor"), 1.0) as (arena,):
        yield arena


@pytest.fixture(scope="module")
def arena_pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Arena]]:
    """Make an arena for programs that end by their own code, and one for programs that may reach the time limit.

    The test file names their kind (ARENA). Only the second arena has a short limit: most of the suite's time passes in
    waiting for it.
    """
    with open_arenas(request.module.ARENA, tmp_path_factory.mktemp("executor"), 2.0, 0.25) as arenas:
        yield arenas

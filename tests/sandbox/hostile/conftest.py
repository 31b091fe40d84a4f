"""The arenas: one sandbox of each kind, shared by all hostile programs."""

import asyncio
import contextlib
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path

import pytest

from tests.sandbox.hostile.arena import Arena, Encounter
from tests.sandbox.hostile.catalogue import HOSTILE
from tests.sandbox.hostile.public_interpreter import public_interpreter
from tests.sandbox.hostile.record import Hostile

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


# Number of concurrent programs, and the smaller number of programs that use the CPUs until the time limit.
_AT_A_TIME, _LIMITED_AT_A_TIME = 16, 8


@contextlib.contextmanager
def open_arenas(loop: asyncio.Runner, name: str, folder: Path, *time_limits_s: float) -> Generator[list[Arena]]:
    backend, namespaces = ARENAS[name]
    arenas: list[Arena] = []
    with contextlib.ExitStack() as stack:
        if namespaces == "off":
            stack.enter_context(public_interpreter())
        for time_limit_s in time_limits_s:
            arenas.append(Arena(loop, backend, namespaces, time_limit_s, folder))
            stack.callback(arenas[-1].close)
            arenas[-1].open()
        for arena in arenas:
            arena.record_state()
        yield arenas


@pytest.fixture(scope="module", params=PARAMETERS)
def arena(
    request: pytest.FixtureRequest, loop: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Arena]:
    with open_arenas(loop, request.param, tmp_path_factory.mktemp("executor"), 0.5) as (arena,):
        yield arena


@pytest.fixture(scope="module")
def arena_pair(
    request: pytest.FixtureRequest, loop: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Arena]]:
    """Make an arena for programs that end before the time limit, and one for programs that can reach it.

    The test file sets the kind of sandbox (ARENA). Only the second arena has a short time limit, because the suite
    spends most of its time in this arena.
    """
    with open_arenas(loop, request.module.ARENA, tmp_path_factory.mktemp("executor"), 2.0, 0.2) as arenas:
        yield arenas


class Batches:
    """The encounters of programs that run at the same time in an arena with namespaces."""

    def __init__(self, names: Sequence[str]) -> None:
        self._left = [HOSTILE[name] for name in names]
        self._found: dict[str, Encounter] = {}

    def meet(self, arena: Arena, hostile: Hostile) -> Encounter:
        if not arena.has_namespaces:
            return arena.meet(hostile)
        if hostile.name not in self._found:
            same = [each for each in self._left if each.reaches_limit == hostile.reaches_limit]
            batch = same[: _LIMITED_AT_A_TIME if hostile.reaches_limit else _AT_A_TIME]
            self._found |= zip((each.name for each in batch), arena.meet_all(batch), strict=True)
            self._left = [each for each in self._left if each not in batch]
        return self._found[hostile.name]


@pytest.fixture(scope="module")
def batches(request: pytest.FixtureRequest) -> Batches:
    """Make batches of the programs that this run selects from the test file."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    return Batches([str(item.callspec.params["name"]) for item in items if item.path == request.path])

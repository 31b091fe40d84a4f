"""The arenas: one sandbox of each kind, shared by all hostile programs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sandbox.hostile.arena import Arena
from tests.sandbox.hostile.public_interpreter import public_interpreter

ARENAS = {
    "process": ("process", "auto"),
    "docker": ("docker", "auto"),
    "process-without-namespaces": ("process", "off"),
}
PARAMETERS = [pytest.param(name, marks=[pytest.mark.docker] if name == "docker" else []) for name in ARENAS]


@pytest.fixture(scope="module", params=PARAMETERS)
def arena(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arena]:
    folder: Path = tmp_path_factory.mktemp("executor")
    running = Arena(*ARENAS[request.param], folder)
    with contextlib.nullcontext() if running.namespaces != "off" else public_interpreter():
        running.open()
        yield running
        running.close()

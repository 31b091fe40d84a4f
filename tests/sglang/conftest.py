"""Session fixtures: two servers (one with a large and one with a small cache), which start when a test first needs
them, and a cold start for whole runs."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from asterism.configs.run_folder import RunFolder
from tests.actors.runs.fixtures import make_once
from tests.sglang.bench import TRAITS, TRAITS_IN_BFLOAT16, SGLangBench, SharedServer
from tests.sglang.runs import PATIENCE_S
from tests.sglang.serving import LONGEST, make_requirements, make_scarce, save_tiny_model

WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
ROOMY_PORT, SCARCE_PORT = 31_400 + 20 * WORKER, 31_410 + 20 * WORKER  # other ports belong to one file each


@pytest.fixture(scope="session")
def loop() -> Iterator[asyncio.Runner]:
    """Yield the event loop of all tests that use the shared servers, and of the tasks that watch these servers."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="session")
def cold_start(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """Return the folder of a finished cold start, whose policy sometimes solves its task."""
    return make_once(tmp_path_factory, "cold_start", "rl.steps=0", "evaluation.questions=0", patience_s=PATIENCE_S)[0]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def servers(
    loop: asyncio.Runner, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[SharedServer, SharedServer]]:
    """Yield the server with a large cache, then the server with a small cache and a short queue."""
    folder = tmp_path_factory.mktemp("servers")
    shared = (
        SharedServer(make_requirements(model, ROOMY_PORT, LONGEST), folder, "roomy"),
        SharedServer(make_scarce(model, SCARCE_PORT), folder, "scarce"),
    )
    yield shared
    for server in shared:
        loop.run(server.close())


@pytest.fixture
def roomy(loop: asyncio.Runner, servers: tuple[SharedServer, SharedServer]) -> SharedServer:
    """Return the server with the large cache, which runs at the start of the test."""
    loop.run(servers[0].start())
    return servers[0]


@pytest.fixture
def bench(servers: tuple[SharedServer, SharedServer], tmp_path: Path) -> SGLangBench:
    """Return a bench in float32 that uses the server with the large cache."""
    return SGLangBench(*servers, tmp_path, TRAITS)


@pytest.fixture
def bench_in_bfloat16(servers: tuple[SharedServer, SharedServer], tmp_path: Path) -> SGLangBench:
    _, scarce = servers
    return SGLangBench(scarce, scarce, tmp_path, TRAITS_IN_BFLOAT16)

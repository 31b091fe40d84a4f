"""The two servers that these tests share, each started once for all files: one with room for all, and one with too little;
and what whole runs begin with."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from configs.run_folder import RunFolder
from tests.actors.running import COLD_START, whole_run
from tests.sglang.bench import TRAITS, TRAITS_IN_BFLOAT16, SGLangBench, Shared
from tests.sglang.runs import PATIENCE_S
from tests.sglang.serving import roomy, scarce, tiny_model

ROOMY_PORT, SCARCE_PORT = 31_300, 31_310


@pytest.fixture(scope="session")
def loop() -> Iterator[asyncio.Runner]:
    """In which the shared servers are watched; what uses them is run there."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="session")
def cold_start(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """Of a policy that is right now and then."""
    settings = (*COLD_START, "rl.steps=0", "evaluation.questions=0")
    return whole_run(tmp_path_factory.mktemp("cold"), *settings, patience_s=PATIENCE_S)[0]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def servers(
    loop: asyncio.Runner, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Shared, Shared]]:
    """The roomy one and the scarce one."""
    folder = tmp_path_factory.mktemp("servers")
    shared = Shared(roomy(model, ROOMY_PORT), folder, "roomy"), Shared(scarce(model, SCARCE_PORT), folder, "scarce")

    async def each(doing: str) -> None:
        await asyncio.gather(*(getattr(server, doing)() for server in shared))

    loop.run(each("start"))
    yield shared
    loop.run(each("close"))


@pytest.fixture
def bench(servers: tuple[Shared, Shared], tmp_path: Path) -> SGLangBench:
    """In float32, where there is room."""
    return SGLangBench(*servers, tmp_path, TRAITS)


@pytest.fixture
def bench_in_bfloat16(servers: tuple[Shared, Shared], tmp_path: Path) -> SGLangBench:
    _, scarce = servers
    return SGLangBench(scarce, scarce, tmp_path, TRAITS_IN_BFLOAT16)

"""Hosts that the tests of a file share, and the tokenizer that host processes use to decode trajectories."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from asterism.tasks.tiny.cold_start_dialogues import generate_dialogues
from asterism.tasks.tiny.prepare import iter_tokenizer_texts
from asterism.tasks.tiny.tiny_tokenizer import save_tokenizer, train_tokenizer
from tests.tasks.hosting.hosts import Host


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    save_tokenizer(train_tokenizer(iter_tokenizer_texts(generate_dialogues(0, 50, 200))), folder)
    return folder


@pytest.fixture(scope="module")
def host(
    request: pytest.FixtureRequest, loop: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Host]:
    """Open the file's SHARED_HOST for all tests of the file that use it."""
    context = request.module.SHARED_HOST(tmp_path_factory.mktemp("task"))
    yield loop.run(context.__aenter__())
    loop.run(context.__aexit__(None, None, None))

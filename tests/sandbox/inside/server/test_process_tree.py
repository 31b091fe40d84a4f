"""Tests of processes that end while the fork server reads them."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from asterism.sandbox.inside.server.process_tree import ProcessTree


@pytest.fixture
def processes() -> Iterator[ProcessTree]:
    fd = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
    yield ProcessTree(fd)
    os.close(fd)


def test_a_process_that_ends_during_a_listing_has_no_descriptors(
    processes: ProcessTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert str(Path(__file__)) not in processes.list_descriptors(os.getpid()).values()
    with Path(__file__).open():
        assert str(Path(__file__)) in processes.list_descriptors(os.getpid()).values()
    before = len(list(Path("/proc/self/fd").iterdir()))

    def fail(fd: int) -> list[str]:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(os, "listdir", fail)
    assert processes.list_descriptors(os.getpid()) == {}
    monkeypatch.undo()
    assert len(list(Path("/proc/self/fd").iterdir())) == before

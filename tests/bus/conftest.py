"""Fixtures of the bus tests: short timeouts, and one network for each kind of transport."""

from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from tests.bus.networks import IN_TESTS, Join, network


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asterism.bus.transport.reliable_transport._CLOSE_TIMEOUT_S", 0.1)
    monkeypatch.setattr("asterism.bus.transport.zeromq._BOOK_POLL_S", 0.02)


@pytest.fixture
def bound() -> int:
    return 1000


@pytest.fixture(params=IN_TESTS)
def join(request: pytest.FixtureRequest, tmp_path: Path, bound: int) -> AbstractAsyncContextManager[Join]:
    return network(request.param, tmp_path, bound)

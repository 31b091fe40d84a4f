"""Short timeouts for tests."""

from __future__ import annotations

import pytest


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bus.transport.reliable_transport._CLOSE_TIMEOUT_S", 0.1)
    monkeypatch.setattr("bus.transport.zeromq._BOOK_POLL_S", 0.02)

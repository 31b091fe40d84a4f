"""Waits that a run can afford are short here."""

from __future__ import annotations

import pytest


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bus.links._FLUSH_S", 0.1)
    monkeypatch.setattr("bus.zeromq._LOOK_S", 0.02)

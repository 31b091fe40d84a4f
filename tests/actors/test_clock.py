"""A process's time never goes back, whatever somebody does to the machine's clock."""

from __future__ import annotations

import time

import pytest

from actors.clock import steady_clock


def test_a_clock_that_is_set_moves_no_time_of_a_living_process(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = steady_clock()
    before = clock()
    monkeypatch.setattr(time, "time", lambda: 5.0)
    assert before <= clock() < before + 60.0


def test_a_later_life_begins_after_what_is_in_its_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 5.0)
    assert steady_clock(not_before=1e9)() >= 1e9
    assert steady_clock()() < 1e6

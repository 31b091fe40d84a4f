"""A process's clock never goes back, also if the system clock is set."""

import time

import pytest

from actors.runtime.decider_loop import make_steady_clock


def test_setting_the_system_clock_does_not_change_a_running_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = make_steady_clock()
    before = clock()
    monkeypatch.setattr(time, "time", lambda: 5.0)
    assert before <= clock() < before + 60.0


def test_a_later_incarnation_starts_after_the_times_in_its_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 5.0)
    assert make_steady_clock(not_before=1e9)() >= 1e9
    assert make_steady_clock()() < 1e6

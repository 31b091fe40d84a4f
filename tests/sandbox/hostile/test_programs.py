"""No hostile program harms its neighbours or the service, or leaves anything, and each has the outcome that it must."""

from __future__ import annotations

import os

import pytest

from bus.messages import CodeOk, Output
from sandbox.contract import SandboxFailure
from tests.sandbox.hostile.arena import Arena, Met
from tests.sandbox.hostile.catalogue import HOSTILE
from tests.sandbox.hostile.record import Ending, Form, Hostile
from tests.sandbox.hostile.without_namespaces import GETS_THROUGH, NOT_RUN, reason_not_to_run

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", HOSTILE)
def test_a_program_that(arena: Arena, name: str) -> None:
    hostile = HOSTILE[name]
    through = None
    if not arena.has_namespaces:
        landlock = arena.client.isolation.landlock
        if reason := reason_not_to_run(name, hostile.signals_others, os.getuid() == 0, landlock):
            pytest.skip(f"not without namespaces: {reason}")
        through = GETS_THROUGH.get(name)
        if through is not None and landlock >= through.stopped_by_landlock:
            through = None
    met = arena.meet(hostile)
    assert met.neighbours == met.unharmed
    assert met.left == {}
    if through is None:
        _check_that_it_is_stopped(met, hostile)
        assert [secret for secret in arena.secrets if secret in repr(met)] == []
    else:
        _check_that_it_gets_through(met, hostile, through.ends)
        assert any(through.warning in sentence for sentence in arena.client.isolation.missing)
    if hostile.spares_its_notebook and met.later is not None:
        assert met.later == CodeOk(Output("['kept']\n"))
    assert not isinstance(met.later, SandboxFailure)


def _check_that_it_is_stopped(met: Met, hostile: Hostile) -> None:
    for form, outcome in met.outcomes.items():
        assert not isinstance(outcome, SandboxFailure), form
        assert any(end.fits(outcome) for end in _ends(hostile, form)), (form, outcome)


def _check_that_it_gets_through(met: Met, hostile: Hostile, ends: tuple[Ending, ...]) -> None:
    for form, outcome in met.outcomes.items():
        assert not isinstance(outcome, SandboxFailure), form
        assert not any(end.fits(outcome) for end in _ends(hostile, form)), f"{form}: stopped, against the table"
        assert any(end.fits(outcome) for end in ends), (form, outcome)


def _ends(hostile: Hostile, form: Form) -> tuple[Ending, ...]:
    return hostile.ends if form == "program" else hostile.ends_as_cell


def test_each_program_that_nothing_stops_without_namespaces_is_one_of_these() -> None:
    assert set(GETS_THROUGH) | set(NOT_RUN) <= set(HOSTILE)
    assert not set(GETS_THROUGH) & set(NOT_RUN)


def test_there_are_many() -> None:
    assert len(HOSTILE) >= 300
    assert sum(len(hostile.forms) for hostile in HOSTILE.values()) >= 550

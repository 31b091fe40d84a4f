"""Each hostile program has an allowed outcome, harms no neighbour or server, and leaves nothing.

One test file for each kind of sandbox imports this test, so that pytest-xdist runs the kinds in parallel.
"""

import os

import pytest

from asterism.sandbox.contract import SandboxFailure
from tests.sandbox.conftest import nightly_in_containers
from tests.sandbox.hostile.arena import NOTEBOOK_IS_KEPT, Arena
from tests.sandbox.hostile.catalogue import HOSTILE, WITHIN_THEIR_PROCESS
from tests.sandbox.hostile.conftest import Batches
from tests.sandbox.hostile.without_namespaces import KNOWN_ESCAPES, get_skip_reason


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[nightly_in_containers] * (name in WITHIN_THEIR_PROCESS)) for name in HOSTILE]
)
def test_a_program_that(arena_pair: list[Arena], batches: Batches, name: str) -> None:
    hostile = HOSTILE[name]
    arena = arena_pair[hostile.reaches_limit]
    escape = None
    if not arena.has_namespaces:
        landlock = arena.client.isolation.landlock
        if reason := get_skip_reason(name, hostile.signals_others, os.getuid() == 0, landlock):
            pytest.skip(f"not without namespaces: {reason}")
        escape = KNOWN_ESCAPES.get(name)
        if escape is not None and landlock >= escape.landlock_stops_since:
            escape = None
    encounter = batches.meet(arena, hostile)
    assert encounter.neighbours == encounter.unharmed
    assert encounter.leftovers == {}
    for form, outcome in encounter.outcomes.items():
        assert not isinstance(outcome, SandboxFailure), form
        is_stopped = any(end.fits(outcome) for end in hostile.list_ends(form))
        has_escaped = escape is not None and any(end.fits(outcome) for end in escape.ends)
        assert (is_stopped, has_escaped) == (escape is None, escape is not None), (form, outcome)
    if escape is None:
        assert [secret for secret in arena.secrets if secret in repr(encounter)] == []
    else:
        assert any(escape.warning in sentence for sentence in arena.client.isolation.missing)
    if hostile.keeps_notebook and encounter.later is not None:
        assert encounter.later == NOTEBOOK_IS_KEPT
    assert not isinstance(encounter.later, SandboxFailure)

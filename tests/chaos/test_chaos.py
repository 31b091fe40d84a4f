"""A few of the runs of `make test-chaos`, chosen so that each process is hit once at least."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.checks import complaints
from tests.chaos.plans import EVERYTHING, Fault
from tests.chaos.play import Undisturbed, play, undisturbed

pytestmark = pytest.mark.slow

CHOSEN = (
    (Fault("head", "kill", 300, 0.0), Fault("generator-1", "kill", 100, 0.0), Fault("rollout-0", "stop", 200, 0.0)),
    (
        Fault("learner rank", "kill", 500, 0.0),
        Fault("executor-0", "kill", 50, 0.0),
        Fault(EVERYTHING, "kill", 150, 0.0),
    ),
)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return undisturbed(tmp_path_factory.mktemp("calm"))


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "faults", CHOSEN, ids=lambda faults: ", ".join(f"{each.action} {each.target}" for each in faults)
)
def test_whoever_is_hit_the_runs_numbers_add_up(tmp_path: Path, calm: Undisturbed, faults: tuple[Fault, ...]) -> None:
    played = play(calm.cold_start, tmp_path, faults)
    assert len(played.history) == len(faults)
    assert list(complaints(played, calm.folder)) == [], "\n".join(played.history)

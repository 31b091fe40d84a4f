"""A few of the runs of `make test-chaos`, chosen so that each process is hit once at least, and one host cut off."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.checks import complaints
from tests.chaos.over_hosts import OverHosts
from tests.chaos.plans import HOST, LAUNCHER, Fault
from tests.chaos.play import OneMachine, Undisturbed, play, undisturbed

pytestmark = pytest.mark.slow

CHOSEN = (
    (Fault("head", "kill", 300, 0.0), Fault("generator-1", "kill", 100, 0.0), Fault("rollout-0", "stop", 200, 0.0)),
    (
        Fault("learner rank", "kill", 500, 0.0),
        Fault("executor-0", "kill", 50, 0.0),
        Fault(LAUNCHER, "kill", 150, 0.0),
    ),
)
OVER_HOSTS = (
    Fault(HOST, "partition", 300, 0.0, host=1, lasts_s=1.0),
    Fault("generator-0", "kill", 50, 0.0, host=1),
    Fault(HOST, "partition", 150, 0.0, host=1, lasts_s=15.0),
    Fault(HOST, "kill", 100, 0.0, host=0),
)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return undisturbed(tmp_path_factory.mktemp("calm"))


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "faults", CHOSEN, ids=lambda faults: ", ".join(f"{each.action} {each.target}" for each in faults)
)
def test_whoever_is_hit_the_runs_numbers_add_up(tmp_path: Path, calm: Undisturbed, faults: tuple[Fault, ...]) -> None:
    played = play(OneMachine(calm.cold_start, tmp_path), faults)
    assert len(played.history) == len(faults)
    assert list(complaints(played, calm.folder)) == [], "\n".join(played.history)


@pytest.mark.hosts
@pytest.mark.timeout(900)
def test_a_run_over_hosts_that_are_cut_off_and_die_does_what_it_did_undisturbed(
    tmp_path: Path, calm: Undisturbed
) -> None:
    played = play(OverHosts(calm.cold_start, tmp_path, 2), OVER_HOSTS)
    assert len(played.history) == len(OVER_HOSTS)
    assert list(complaints(played, calm.folder)) == [], "\n".join(played.history)

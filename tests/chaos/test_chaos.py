"""A few fixed runs as in `make test-chaos`. A fault hits most processes once, and one host is disconnected."""

from pathlib import Path

import pytest

from asterism.configs.run_folder import RunFolder
from tests.chaos.checks import find_violations
from tests.chaos.over_hosts import OverHosts
from tests.chaos.plans import HOST, LAUNCHER, Fault
from tests.chaos.play import Baseline, OneMachine, play, run_baseline

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

CHOSEN = (
    (Fault("head", "kill", 300, 0.0), Fault("generator-1", "kill", 100, 0.0), Fault("rollout-0", "stop", 200, 0.0)),
    (Fault("learner", "kill", 500, 0.0), Fault("executor-0", "kill", 50, 0.0), Fault(LAUNCHER, "kill", 150, 0.0)),
)
OVER_HOSTS = (
    Fault(HOST, "partition", 300, 0.0, host=1, lasts_s=1.0),
    Fault("generator-0", "kill", 50, 0.0, host=1),
    Fault(HOST, "partition", 150, 0.0, host=1, lasts_s=15.0),
    Fault(HOST, "kill", 100, 0.0, host=0),
)


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory, finished_run: tuple[RunFolder, str]) -> Baseline:
    return run_baseline(finished_run[0], tmp_path_factory.mktemp("baseline"))


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "faults", CHOSEN, ids=lambda faults: ", ".join(f"{each.action} {each.target}" for each in faults)
)
def test_a_run_with_faults_keeps_its_invariants(tmp_path: Path, baseline: Baseline, faults: tuple[Fault, ...]) -> None:
    result = play(OneMachine(baseline.cold_start, tmp_path), faults)
    assert len(result.history) == len(faults)
    assert list(find_violations(result, baseline.folder)) == [], "\n".join(result.history)


@pytest.mark.hosts
@pytest.mark.timeout(900)
def test_a_run_over_hosts_with_partitions_and_kills_keeps_its_invariants(tmp_path: Path, baseline: Baseline) -> None:
    result = play(OverHosts(baseline.cold_start, tmp_path, 2), OVER_HOSTS)
    assert len(result.history) == len(OVER_HOSTS)
    assert list(find_violations(result, baseline.folder)) == [], "\n".join(result.history)

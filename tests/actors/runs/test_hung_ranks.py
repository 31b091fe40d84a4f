"""One of two learner ranks is killed or stopped in the middle of an operation.

The learner restarts as a whole, and the run ends as without the fault.
"""

import re
import signal

import pytest

from asterism.analysis.event_logs.diff import list_divergences
from asterism.configs.run_folder import RunFolder
from tests.actors.runs.running import (
    Start,
    from_cold_start_of,
    list_process_ids,
    metrics,
    read_conserved_summary,
    read_log_entries,
    whole_run,
)
from tests.chaos.rank_faults import LOSS, RankFault, make_environment
from tests.processes import processes_that_name

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PATIENCE_S = 600.0  # allows four starts of the learner on a busy machine
OPERATIONS = ("publish", "forward and backward", "save")  # operations with a fault, in the steps 1, 2 and 3
SETTINGS = (
    *(f"learner.loss.function={LOSS}", "learner.ranks=2", "rl.prompts=4", "rl.rollouts=8", "rl.max_refill_groups=2"),
    *("supervision.heartbeat_s=0.5", "supervision.heartbeat_timeout_s=4", "determinism=strict"),
)


@pytest.fixture(scope="module")
def undisturbed(finished: RunFolder, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    runs = tmp_path_factory.mktemp("undisturbed")
    return whole_run(runs, *from_cold_start_of(finished), *SETTINGS, patience_s=PATIENCE_S)[0]


def run_with_faults(start_trained: Start, faults: list[RankFault], *settings: str) -> tuple[RunFolder, str]:
    """Run three steps with these faults, and return the folder and the output; the run must succeed."""
    run = start_trained(*SETTINGS, *settings, environment=make_environment(faults))
    return run.folder, run.succeed(PATIENCE_S)


def list_probes(folder: RunFolder) -> list[dict[str, float]]:
    """Return the probe figures of each step, which must not change with a restart; `log diff` omits some."""
    lines = metrics(folder, "step")
    return [{name: line[name] for name in line if name.startswith("probe_") and name != "probe_s"} for line in lines]


def check_restarts(folder: RunFolder, output: str, faults: list[RankFault]) -> None:
    """Check that each fault restarted the learner once, a stopped rank was named, and no trajectory was lost."""
    assert len(list_process_ids(folder, "learner")) == len(faults) + 1
    assert [entry["name"] for entry in read_log_entries(folder, "process.died")] == ["learner"] * len(faults)
    hangs = [entry["cause"] for entry in read_log_entries(folder, "process.timed_out")]
    stops = [fault for fault in faults if fault.signal == signal.SIGSTOP]
    assert len(hangs) == len(stops)
    for fault, cause in zip(stops, hangs, strict=True):
        operations = ", ".join(f"(.*, )?in {name} since .* s" for name in fault.operations)
        assert re.match(f"learner rank {fault.rank}: no heartbeat for .* s, {operations}", cause), cause
        assert f"learner was killed by signal 9 ({cause}); it restarts" in output
    assert read_conserved_summary(folder)["trajectories_abandoned"] == 0
    assert [line["step"] for line in metrics(folder, "step")] == [1, 2, 3]
    assert not processes_that_name(str(folder.path))


@pytest.mark.nightly
def test_a_stopped_follower_is_named_and_the_learner_restarts(start_trained: Start) -> None:
    faults = [RankFault(1, 2, "save", signal.SIGSTOP)]
    settings = ("rl.prompts=2", "rl.rollouts=4", "evaluation.questions=0")
    check_restarts(*run_with_faults(start_trained, faults, *settings), faults)


@pytest.mark.nightly
def test_a_rank_that_sends_heartbeats_but_makes_no_progress_is_restarted(
    start_trained: Start, undisturbed: RunFolder
) -> None:
    """Rank 0 waits for the other rank in a barrier, which has no timeout."""
    faults = [RankFault(1, 2, "barrier", None)]
    folder, output = run_with_faults(start_trained, faults, "learner.collective_timeout_s=10")
    assert len(list_process_ids(folder, "learner")) == 2
    (hang,) = read_log_entries(folder, "process.timed_out")
    operations = r"in step 2 since .* s, in publish since .* s, in barrier since .* s, limit of publish: 10 s"
    assert re.match(rf"learner rank \d: {operations}", hang["cause"])
    assert f"learner was killed by signal 9 ({hang['cause']}); it restarts" in output
    assert list_divergences(undisturbed, folder) == []  # trajectories, metrics and the last checkpoint are equal
    assert list_probes(undisturbed) == list_probes(folder)
    assert read_conserved_summary(folder)["trajectories_abandoned"] == 0


@pytest.mark.nightly
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_run_survives_a_killed_or_stopped_rank_in_a_publication_a_step_and_a_save(
    start_trained: Start, undisturbed: RunFolder, rank: int, number: signal.Signals
) -> None:
    faults = [RankFault(rank, step, operation, number) for step, operation in enumerate(OPERATIONS, 1)]
    folder, output = run_with_faults(start_trained, faults)
    check_restarts(folder, output, faults)
    assert list_divergences(undisturbed, folder) == []  # trajectories, metrics and the last checkpoint are equal
    assert list_probes(undisturbed) == list_probes(folder)

"""Runs on a disk that becomes full end with an error, and resume with free space. They have a rollout policy."""

import contextlib
import json
import os
import re
import signal
from pathlib import Path

import pytest

from asterism.configs.run_folder import RunFolder
from tests.actors.runs.running import (
    find_last_complete_step,
    finish,
    from_cold_start_of,
    is_conserved,
    list_process_ids,
    metrics,
    succeed,
    wait_until,
)
from tests.actors.runs.small_disk import SmallDisk
from tests.chaos.play import find_leftovers

pytestmark = [pytest.mark.slow, pytest.mark.hosts]

STEPS = 6  # enough steps that the test can stop the learner before the run ends
POLICY = "rl.rollout_policy=examples/rollout_policies.py:TreeSearch"
SETTINGS = (f"rl.steps={STEPS}", "evaluation.questions=2", POLICY)
FILE = r"(events|logs|batches|checkpoints)/\S+|(metrics|answers)\.jsonl"


@pytest.mark.parametrize(
    "left_kib",
    [pytest.param(0, id="nothing"), pytest.param(1024, id="less_than_a_checkpoint", marks=pytest.mark.nightly)],
)
def test_a_full_disk_ends_the_run_and_it_resumes_with_free_space(
    tmp_path: Path, finished: RunFolder, left_kib: int
) -> None:
    """The disk fills during training, and any process with open files can be the first to fail."""
    settings = (*from_cold_start_of(finished), *SETTINGS)
    with SmallDisk(tmp_path, 160) as disk:
        process = disk.launch(*settings)
        folder = RunFolder(disk.resolve(tmp_path / "demo"))
        wait_until(lambda: len(metrics(folder, "step")) >= 1, process)
        [learner] = list_process_ids(folder, "learner")
        os.kill(learner, signal.SIGSTOP)  # the run cannot end before the disk is full
        disk.fill(left_kib)
        with contextlib.suppress(ProcessLookupError):  # the launcher can have killed the learner
            os.kill(learner, signal.SIGCONT)
        output = finish(process)
        assert process.returncode == 1, output
        assert re.search(f"{tmp_path}/demo/({FILE}): (No space left on device|database or disk is full)", output), (
            output
        )
        assert "--resume" in output
        assert "Traceback" not in output
        assert list(find_leftovers(RunFolder(tmp_path / "demo"))) == []
        last_step = find_last_complete_step(folder)
        # The learner writes the checkpoint of a step while it trains the next one.
        assert len(metrics(folder, "step")) - last_step in (0, 1, 2)

        disk.empty()
        resumed = disk.launch(*settings, "--resume")
        output = succeed(resumed)
        assert f"resuming after step {last_step}" in output
        assert [step["step"] for step in metrics(folder, "step")] == list(range(1, STEPS + 1))
        summary = json.loads(folder.summary.read_text())
        assert is_conserved(summary)
        assert "identical" in disk.asterism("log", "replay", f"{tmp_path}/demo", "--verify")
        for log in folder.logs.glob("*.jsonl"):
            assert [json.loads(line)["event"] for line in log.read_bytes().splitlines()]

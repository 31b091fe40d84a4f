"""Strict determinism over real processes: runs with the same seed have the same results, whatever the timing."""

import contextlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from asterism.analysis.event_logs.comparable_events import read_event_streams
from asterism.analysis.event_logs.diff import list_divergences
from asterism.bus.messages import TrajectoryFailed
from asterism.configs.file_manifest import MANIFEST_NAME
from asterism.configs.run_folder import RunFolder
from tests.actors.runs.running import (
    Start,
    from_cold_start_of,
    list_process_ids,
    metrics,
    read_conserved_summary,
    read_messages,
    wait_until_exited,
    whole_run,
)
from tests.actors.runs.test_dead_runs import list_held, start_next_run
from tests.edited_logs import editing_log
from tests.processes import family

pytestmark = pytest.mark.slow

# settings of a run with a few cold start and RL steps; the policy is sometimes right, and groups are refilled
STRICT = (
    *("determinism=strict", "sft.steps=2", "sft.batch_size=4"),
    *("rl.prompts=4", "rl.rollouts=6", "rl.max_refill_groups=4"),
)


@pytest.fixture(scope="module")
def strict_run(tmp_path_factory: pytest.TempPathFactory, finished: RunFolder) -> RunFolder:
    return whole_run(tmp_path_factory.mktemp("strict"), *from_cold_start_of(finished), *STRICT)[0]


@contextlib.contextmanager
def busy_machine() -> Iterator[None]:
    """Keep two cores busy."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


@pytest.mark.nightly
def test_a_second_run_on_a_busy_machine_is_identical_byte_for_byte(start_trained: Start, strict_run: RunFolder) -> None:
    with busy_machine():
        again = start_trained(*STRICT)
        again.succeed()
    assert list_divergences(strict_run, again.folder) == []
    steps = metrics(again.folder, "step")
    assert sum(step["updates"] for step in steps) > 0
    assert sum(step["groups_rejected"] for step in steps) > 0
    assert len(metrics(again.folder, "evaluation")) == 4


@pytest.mark.nightly
def test_the_number_of_engines_or_executors_and_the_cache_size_do_not_change_the_results(
    start_trained: Start, strict_run: RunFolder
) -> None:
    engines = ("engine.num_engines=2", "engine.kv_tokens=800", "engine.prefill_tokens=9", "arbiter.policy=round_robin")
    other = start_trained(*STRICT, *engines, "sandbox.executors=2", "sandbox.fork_servers=2")
    other.succeed()
    assert list_divergences(strict_run, other.folder) == []


def test_a_run_survives_kills_of_its_processes_and_of_its_launcher_with_the_same_results(
    tmp_path: Path, start_trained: Start, strict_run: RunFolder
) -> None:
    """The test kills the other processes after the first step, and the launcher after the second step."""
    settings = (*STRICT, "learner.checkpoints.every=2")
    run = start_trained(*settings)
    run.wait_for("step")
    for name in ("learner", "head", "rollout-0", "generator-0"):
        run.signal(name)
        run.wait_until(lambda name=name: len(list_process_ids(run.folder, name)) == 2)
    run.wait_for("step", 2)
    launcher, *children = family(run.process.pid)
    held = list_held([launcher, *children])
    assert len(children) >= 6
    assert {run.folder.sockets, run.folder.shared_memory} < held
    run.kill()
    wait_until_exited(children)
    assert read_messages(run.folder, "head", TrajectoryFailed) == []
    start_next_run(tmp_path)
    assert [path for path in held if path.exists()] == []
    start_trained(*settings, "--resume").succeed()
    assert read_conserved_summary(run.folder)["trajectories_failed"] == 0
    assert [step["step"] for step in metrics(run.folder, "step")] == [1, 2, 3]
    assert [line["label"] for line in metrics(run.folder, "evaluation")] == [
        *("start_sampled", "start_greedy"),
        *("end_sampled", "end_greedy"),
    ]
    assert list_divergences(strict_run, run.folder) == []


@pytest.mark.nightly
def test_two_runs_with_two_learner_ranks_are_identical(tmp_path: Path, finished: RunFolder) -> None:
    from torch.distributed.checkpoint.filesystem import FileSystemReader  # slow imports, not needed for collection

    from asterism.engine.learner.checkpoints.checkpoint_folders import get_tensors_folder

    ranks = ("learner.ranks=2", "learner.threads=2", "rl.steps=2", "evaluation.questions=0")
    settings = (*from_cold_start_of(finished), *STRICT, *ranks)
    first, second = (whole_run(tmp_path / name, *settings)[0] for name in ("first", "second"))
    assert list_divergences(first, second) == []
    saved = FileSystemReader(get_tensors_folder(first.get_checkpoint_path(2))).read_metadata().state_dict_metadata
    assert {"random.cpu_0", "random.cpu_1"} <= set(saved)


def test_a_run_equals_itself_and_every_part_is_compared(strict_run: RunFolder) -> None:
    assert list_divergences(strict_run, strict_run) == []
    assert {name.split()[0] for name in read_event_streams(strict_run)} == {
        *("trajectory", "step", "evaluation", "weights", "metrics,", "checkpoint")
    }


def test_each_differing_part_is_named(strict_run: RunFolder, tmp_path: Path) -> None:
    copy = RunFolder(tmp_path / "demo")
    shutil.copytree(strict_run.path, copy.path)
    for process, which in (
        ("head", "max(seq) FROM events WHERE kind = 'TrajectoryFinished'"),
        ("head", "max(seq) FROM events WHERE kind = 'WeightsPublished'"),
        ("rollout-0", "min(seq) FROM events WHERE kind = 'CodeFinished'"),
    ):
        with editing_log(copy.events / f"{process}.sqlite") as log:
            log.execute(f"DELETE FROM events WHERE seq = (SELECT {which})")
    lines = [json.loads(line) for line in copy.metrics.read_text().splitlines()]
    lines[0] |= {"step_s": 7.0}
    lines[-1] |= {"accuracy": 7.0}
    copy.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    changed = copy.get_checkpoint_path(3) / "model.safetensors"
    changed.write_bytes(changed.read_bytes()[:-1] + b"x")
    (changed.parent / MANIFEST_NAME).unlink()
    streams = sorted(each.stream for each in list_divergences(strict_run, copy))
    patterns = (
        r"checkpoint step_000003",
        r"metrics, evaluation \S+ 3",
        *[r"trajectory \d+"] * 2,
        r"weights of version 3",
    )
    assert all(re.fullmatch(pattern, name) for pattern, name in zip(patterns, streams, strict=True)), streams

"""A run claims a new folder, or resumes or overwrites a folder; a refusal names the flag that helps."""

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from asterism.actors.launch.claim_run_folder import (
    RunAlreadyFinished,
    RunFolderError,
    claimed_run_folder,
    increment_counter,
)
from asterism.bus.transport.curve_auth import generate_key
from asterism.configs.choices.sink_kinds import SINK_KINDS
from asterism.configs.errors import UnusableInput
from asterism.configs.file_manifest import MANIFEST_NAME
from asterism.configs.load import load_run
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.algorithm import EvaluationConfig
from asterism.configs.schema.machines import ClusterConfig
from asterism.configs.schema.run_config import RunConfig


def run_in(tmp_path: Path, **changes: object) -> RunConfig:
    return replace(RunConfig(name="r", runs_folder=str(tmp_path)), **changes)


def claim(run: RunConfig, *, resume: bool = False, overwrite: bool = False) -> Path:
    with claimed_run_folder(run, resume=resume, overwrite=overwrite) as folder:
        assert folder.sockets.is_dir()
        assert folder.sockets.stat().st_mode & 0o777 == 0o700
        return folder.path


def refuse(run: RunConfig, *, resume: bool = False, overwrite: bool = False) -> str:
    """Return the error of a claim that must be refused."""
    with pytest.raises(RunFolderError) as refused:
        claim(run, resume=resume, overwrite=overwrite)
    return str(refused.value)


def begin(run: RunConfig) -> Path:
    """Make the folder of a run that has a checkpoint."""
    path = claim(run)
    (path / "checkpoints" / "step_000000").mkdir(parents=True)
    return path


def test_a_new_run_gets_a_folder_with_its_resolved_configuration(tmp_path: Path) -> None:
    run = run_in(tmp_path, seed=4)
    assert load_run(claim(run) / "config.toml") == run


def test_an_existing_run_is_refused_and_both_flags_are_named(tmp_path: Path) -> None:
    begin(run_in(tmp_path))
    expected = "was not finished; --resume continues it; --name r-2 starts another run; --overwrite deletes it"
    assert expected in refuse(run_in(tmp_path))


def test_a_changed_configuration_is_refused_with_the_changed_keys(tmp_path: Path) -> None:
    begin(run_in(tmp_path))
    for resume in (False, True):
        refused = refuse(run_in(tmp_path, seed=1), resume=resume)
        assert re.search(r"(?s)seed: 0 -> 1\n--name r-2 starts.*--resume.*--overwrite", refused)


def test_resume_keeps_the_files_of_the_run(tmp_path: Path) -> None:
    existing = begin(run_in(tmp_path)) / "notes.txt"
    existing.write_text("x")
    claim(run_in(tmp_path), resume=True)
    assert existing.exists()


def test_a_folder_without_events_and_checkpoints_accepts_any_configuration(tmp_path: Path) -> None:
    (claim(run_in(tmp_path)) / "logs").mkdir()
    path = claim(run_in(tmp_path, seed=1))
    assert load_run(path / "config.toml").seed == 1
    assert sorted(entry.name for entry in path.iterdir()) == [MANIFEST_NAME, "config.toml", "lock"]


def test_folders_of_sinks_do_not_prevent_another_configuration(tmp_path: Path) -> None:
    path = claim(run_in(tmp_path))
    for name in ("sinks", *(sink.store for sink in SINK_KINDS.values())):
        (path / name).mkdir()
    assert load_run(claim(run_in(tmp_path, seed=1)) / "config.toml").seed == 1


@pytest.mark.parametrize("name", ["summary.json", "metrics.jsonl", "notes.txt"])
def test_results_without_events_and_checkpoints_are_never_deleted(tmp_path: Path, name: str) -> None:
    kept = claim(run_in(tmp_path)) / name
    kept.write_text("{}")
    for run in (run_in(tmp_path), run_in(tmp_path, seed=1)):
        assert "--overwrite deletes it" in refuse(run)
    assert kept.read_text() == "{}"


def test_a_finished_run_is_not_resumed(tmp_path: Path) -> None:
    (begin(run_in(tmp_path)) / "summary.json").write_text("{}")
    with pytest.raises(RunAlreadyFinished, match=r"this run is finished; its results are in .*/summary.json"):
        claim(run_in(tmp_path), resume=True)
    (tmp_path / "r-2").mkdir()
    assert "exists and is finished; --name r-3 starts another run; --overwrite" in refuse(run_in(tmp_path))


def test_an_evaluation_with_results_is_finished(tmp_path: Path) -> None:
    run = run_in(tmp_path, name="eval-r-40", evaluation=EvaluationConfig(only=True))
    (claim(run) / "results.json").write_text("{}")
    assert "is finished; --name eval-r-40-2 starts another run" in refuse(run)


def test_a_run_can_be_resumed_in_another_cluster(tmp_path: Path) -> None:
    key = str(generate_key(tmp_path / "keys"))
    begin(run_in(tmp_path, cluster=ClusterConfig(nodes=4, learner_nodes=2, key=key)))
    moved = run_in(tmp_path, cluster=ClusterConfig(nodes=2, key=key, port=30_000))
    assert load_run(claim(moved, resume=True) / "config.toml") == moved
    assert re.search(r"seed: 0 -> 1\n.* to --resume", refuse(run_in(tmp_path, seed=1), resume=True))


def test_overwrite_starts_with_an_empty_folder(tmp_path: Path) -> None:
    path = begin(run_in(tmp_path))
    (path / "metrics.jsonl").write_text("x")
    claim(run_in(tmp_path, seed=9), overwrite=True)
    assert sorted(entry.name for entry in path.iterdir()) == [MANIFEST_NAME, "config.toml", "lock"]


def test_an_unusable_key_or_address_deletes_nothing(tmp_path: Path) -> None:
    existing = begin(run_in(tmp_path)) / "summary.json"
    existing.write_text("{}")
    key = str(generate_key(tmp_path / "keys"))
    with pytest.raises(UnusableInput, match=f"^{tmp_path}/none: No such file"):
        claim(run_in(tmp_path, cluster=ClusterConfig(key=f"{tmp_path}/none")), overwrite=True)
    with pytest.raises(UnusableInput, match=r"^tcp://192\.0\.2\.1:29700: .*; set another address with cluster\.host"):
        claim(run_in(tmp_path, cluster=ClusterConfig(key=key, host="192.0.2.1")), overwrite=True)
    assert existing.exists()


def test_resume_and_overwrite_together_are_refused(tmp_path: Path) -> None:
    existing = begin(run_in(tmp_path)) / "summary.json"
    existing.write_text("{}")
    refused = refuse(run_in(tmp_path), resume=True, overwrite=True)
    assert "--resume continues a run and --overwrite deletes it" in refused
    assert existing.exists()


def test_launches_are_counted(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert [increment_counter(folder.launch_counter) for _ in range(3)] == [1, 2, 3]
    assert [path.name for path in tmp_path.iterdir()] == [folder.launch_counter.name]


def test_a_failed_write_keeps_the_old_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(tmp_path)
    increment_counter(folder.launch_counter)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        increment_counter(folder.launch_counter)
    assert folder.launch_counter.read_text() == "1\n"


def test_a_counter_file_without_a_number_is_named(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for content in (b"", b"x\n", b"\xff"):
        folder.launch_counter.write_bytes(content)
        with pytest.raises(UnusableInput, match=f"^{folder.launch_counter}: not a number"):
            increment_counter(folder.launch_counter)


def test_resuming_a_missing_run_is_refused(tmp_path: Path) -> None:
    assert "no run to resume" in refuse(run_in(tmp_path), resume=True)
    assert not list(tmp_path.iterdir())


def test_a_folder_with_other_files_is_refused_and_never_deleted(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "thesis.tex").write_text("years of work")
    for overwrite in (False, True):
        assert "not a run folder" in refuse(run_in(tmp_path), overwrite=overwrite)
    assert (tmp_path / "r" / "thesis.tex").exists()


def test_a_second_run_in_the_same_folder_is_refused_and_the_first_is_named(tmp_path: Path) -> None:
    with (
        claimed_run_folder(run_in(tmp_path), resume=False, overwrite=False) as folder,
        pytest.raises(RunFolderError, match=rf"using this folder \(process {os.getpid()}\)"),
        claimed_run_folder(run_in(tmp_path), resume=False, overwrite=True),
    ):
        pass
    assert folder.config.exists()


@pytest.mark.slow
def test_the_folder_of_a_killed_run_can_be_claimed(tmp_path: Path) -> None:
    program = (
        "import os, signal\nfrom asterism.actors.launch.claim_run_folder import claimed_run_folder\nfrom asterism.configs.schema.run_config import RunConfig\n"
        f"with claimed_run_folder(RunConfig(name='r', runs_folder={str(tmp_path)!r}), resume=False, overwrite=False):\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", program])
    assert killed.returncode == -9
    claim(run_in(tmp_path), resume=True)


def test_a_file_at_the_folders_path_is_named(tmp_path: Path) -> None:
    (tmp_path / "r").write_text("")
    assert "r: File exists" in refuse(run_in(tmp_path))


CLAIM = """
import subprocess, sys
from asterism.actors.launch.claim_run_folder import RunAlreadyFinished, RunFolderError, claimed_run_folder, increment_counter
from asterism.configs.schema.run_config import RunConfig
subprocess.run(["mount", "-t", "tmpfs", "-o", {options!r}, "none", {folder!r}], check=True)
try:
    with claimed_run_folder(RunConfig(name="r", runs_folder={folder!r}), resume=False, overwrite=False):
        print("claimed")
except RunFolderError as error:
    print(error)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [("size=1m", "MiB free on this disk; a run needs at least 64"), ("ro", "Read-only file system")],
)
def test_a_full_disk_and_a_read_only_folder_are_named(tmp_path: Path, options: str, message: str) -> None:
    script = CLAIM.format(options=options, folder=str(tmp_path))
    unshare = ["unshare", "--user", "--map-root-user", "--mount"]  # a user namespace needs no privileges
    done = subprocess.run([*unshare, sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert str(tmp_path) in done.stdout
    assert message in done.stdout

"""Whose a run's folder is: new, resumed, written over, or refused with the flag that helps."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from actors.run_setup import RunRefused, claimed, next_boot
from bus.curve import make_key
from configs.errors import UnusableInput
from configs.load import load_resolved
from configs.run_folder import RunFolder
from configs.schema import Cluster, Run


def run_in(tmp_path: Path, **changes: object) -> Run:
    return replace(Run(name="r", runs_folder=str(tmp_path)), **changes)


def take(run: Run, *, resume: bool = False, overwrite: bool = False) -> Path:
    with claimed(run, resume=resume, overwrite=overwrite) as folder:
        assert folder.sockets.is_dir()
        assert folder.sockets.stat().st_mode & 0o777 == 0o700
        return folder.path


def test_a_new_run_gets_a_folder_with_its_resolved_configuration(tmp_path: Path) -> None:
    run = run_in(tmp_path, seed=4)
    assert load_resolved(take(run) / "config.toml") == run


def test_a_run_that_exists_is_refused_and_both_flags_are_named(tmp_path: Path) -> None:
    take(run_in(tmp_path))
    with pytest.raises(RunRefused, match=r"was not finished: --resume goes on, --overwrite begins anew"):
        take(run_in(tmp_path))


def test_another_configuration_is_refused_with_the_keys_that_differ(tmp_path: Path) -> None:
    take(run_in(tmp_path))
    for resume in (False, True):
        with pytest.raises(RunRefused, match=r"(?s)seed: 0 -> 1.*--overwrite.*--resume"):
            take(run_in(tmp_path, seed=1), resume=resume)


def test_resume_keeps_what_is_there(tmp_path: Path) -> None:
    kept = take(run_in(tmp_path)) / "kept"
    kept.write_text("x")
    take(run_in(tmp_path), resume=True)
    assert kept.exists()


def test_a_run_goes_on_in_another_cluster_than_it_began_in(tmp_path: Path) -> None:
    key = str(make_key(tmp_path / "keys"))
    take(run_in(tmp_path, cluster=Cluster(nodes=4, learner_nodes=2, key=key)))
    moved = run_in(tmp_path, cluster=Cluster(nodes=2, key=key, port=30_000))
    assert load_resolved(take(moved, resume=True) / "config.toml") == moved
    with pytest.raises(RunRefused, match=r"seed: 0 -> 1\n--overwrite"):
        take(run_in(tmp_path, seed=1), resume=True)


def test_overwrite_begins_with_an_empty_folder(tmp_path: Path) -> None:
    path = take(run_in(tmp_path))
    (path / "checkpoints").mkdir()
    (path / "metrics.jsonl").write_text("x")
    take(run_in(tmp_path, seed=9), overwrite=True)
    assert sorted(entry.name for entry in path.iterdir()) == ["config.toml", "lock"]


def test_a_key_or_an_address_that_cannot_be_used_deletes_nothing(tmp_path: Path) -> None:
    kept = take(run_in(tmp_path)) / "summary.json"
    kept.write_text("{}")
    key = str(make_key(tmp_path / "keys"))
    with pytest.raises(UnusableInput, match=f"^{tmp_path}/none: No such file"):
        take(run_in(tmp_path, cluster=Cluster(key=f"{tmp_path}/none")), overwrite=True)
    with pytest.raises(
        UnusableInput, match=r"^tcp://192\.0\.2\.1:29700: .*; cluster\.host and cluster\.port say where"
    ):
        take(run_in(tmp_path, cluster=Cluster(key=key, host="192.0.2.1")), overwrite=True)
    assert kept.exists()


def test_who_wants_to_resume_and_to_overwrite_is_asked_which(tmp_path: Path) -> None:
    kept = take(run_in(tmp_path)) / "summary.json"
    kept.write_text("{}")
    with pytest.raises(RunRefused, match="--resume goes on with a run and --overwrite deletes it"):
        take(run_in(tmp_path), resume=True, overwrite=True)
    assert kept.exists()


def test_launches_are_counted(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert [next_boot(folder) for _ in range(3)] == [1, 2, 3]
    assert [path.name for path in tmp_path.iterdir()] == [folder.boots.name]


def test_a_count_that_cannot_be_replaced_stays_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(tmp_path)
    next_boot(folder)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        next_boot(folder)
    assert folder.boots.read_text() == "1\n"


def test_a_file_that_holds_no_count_is_named(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for content in (b"", b"x\n", b"\xff"):
        folder.boots.write_bytes(content)
        with pytest.raises(UnusableInput, match=f"^{folder.boots}: this is no count"):
            next_boot(folder)


def test_there_must_be_a_run_to_resume(tmp_path: Path) -> None:
    with pytest.raises(RunRefused, match="no run to resume"):
        take(run_in(tmp_path), resume=True)


def test_a_folder_that_holds_something_else_is_not_taken_and_never_deleted(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "thesis.tex").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(RunRefused, match="is not a run's"):
            take(run_in(tmp_path), overwrite=overwrite)
    assert (tmp_path / "r" / "thesis.tex").exists()


def test_a_second_run_in_the_same_folder_is_refused_and_the_first_is_named(tmp_path: Path) -> None:
    with (
        claimed(run_in(tmp_path), resume=False, overwrite=False) as folder,
        pytest.raises(RunRefused, match=rf"using this folder \(process {os.getpid()}\)"),
        claimed(run_in(tmp_path), resume=False, overwrite=True),
    ):
        pass
    assert folder.config.exists()


@pytest.mark.slow
def test_the_folder_of_a_killed_run_is_free_again(tmp_path: Path) -> None:
    program = (
        "import os, signal\nfrom actors.run_setup import claimed\nfrom configs.schema import Run\n"
        f"with claimed(Run(name='r', runs_folder={str(tmp_path)!r}), resume=False, overwrite=False):\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", program])
    assert killed.returncode == -9
    take(run_in(tmp_path), resume=True)


def test_a_file_in_the_folders_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "r").write_text("")
    with pytest.raises(RunRefused, match="r: File exists"):
        take(run_in(tmp_path))


def in_namespace(script: str) -> subprocess.CompletedProcess[str]:
    """Run Python where mounts are private to it, as an ordinary user may."""
    return subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", sys.executable, "-c", script],
        capture_output=True,
        text=True,
    )


CLAIM = """
import subprocess, sys
from actors.run_setup import RunRefused, claimed, next_boot
from configs.schema import Run
subprocess.run(["mount", "-t", "tmpfs", "-o", {options!r}, "none", {folder!r}], check=True)
try:
    with claimed(Run(name="r", runs_folder={folder!r}), resume=False, overwrite=False):
        print("taken")
except RunRefused as error:
    print(error)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "complaint"),
    [("size=1m", "MiB free on this disk; a run needs 64 at least"), ("ro", "Read-only file system")],
)
def test_a_full_disk_and_a_read_only_folder_are_named(tmp_path: Path, options: str, complaint: str) -> None:
    done = in_namespace(CLAIM.format(options=options, folder=str(tmp_path)))
    assert done.returncode == 0, done.stderr
    assert str(tmp_path) in done.stdout
    assert complaint in done.stdout

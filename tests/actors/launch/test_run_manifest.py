"""The manifest of a run's folder lists files; a resume compares the files with the manifest."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from asterism.actors.launch.claim_run_folder import claimed_run_folder
from asterism.actors.launch.run_manifest import (
    check_run_files,
    list_run_files,
    write_first_manifest,
    write_run_manifest,
)
from asterism.bus.event_log.writer import EventLog
from asterism.configs.errors import UnusableInput
from asterism.configs.file_manifest import MANIFEST_NAME, read_manifest
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.run_config import RunConfig

FILES = ("metrics.jsonl", "answers.jsonl", "logs/head.jsonl", "logs/head.out", "boots", "summary.json")
UNLISTED = (
    "curves.png",
    "curves.svg",
    "utilization.json",
    "lock",
    "batches/metrics_000001.msgpack",
    "exports/step_000001/config.json",
)


def begin(tmp_path: Path) -> tuple[RunConfig, RunFolder]:
    run = replace(RunConfig(name="r", runs_folder=str(tmp_path)))
    with claimed_run_folder(run, resume=False, overwrite=False) as folder:
        for name in (*FILES[:-1], *UNLISTED):
            (folder.path / name).parent.mkdir(parents=True, exist_ok=True)
            (folder.path / name).write_text("123\n")
        (folder.checkpoints / "step_000000").mkdir(parents=True)
        EventLog(folder.events / "head.sqlite").close()
    return run, folder


def test_the_end_of_a_launch_lists_the_files_that_commands_read(tmp_path: Path) -> None:
    _, folder = begin(tmp_path)
    manifest = read_manifest(folder.path)
    assert manifest is not None
    assert set(manifest.files) == {"config.toml", "events/head.sqlite", *FILES[:-1]}


@pytest.mark.parametrize("name", ["config.toml", "events/head.sqlite", *FILES[:-1]])
def test_a_resume_with_a_damaged_file_is_refused_with_its_name_and_a_remedy(tmp_path: Path, name: str) -> None:
    run, folder = begin(tmp_path)
    path = folder.path / name
    path.write_bytes(path.read_bytes()[:-1] + b"7")
    with (
        pytest.raises(UnusableInput, match=rf"{path}: damaged.* restore it from a copy, or delete .*{MANIFEST_NAME}"),
        claimed_run_folder(run, resume=True, overwrite=False),
    ):
        pass
    assert (folder.path / MANIFEST_NAME).exists()


def test_a_resumed_launch_removes_the_manifest_and_writes_another(tmp_path: Path) -> None:
    run, folder = begin(tmp_path)
    with claimed_run_folder(run, resume=True, overwrite=False):
        assert not (folder.path / MANIFEST_NAME).exists()
        write_first_manifest(folder)
        folder.metrics.write_text("4567\n")
        check_run_files(folder)
    check_run_files(folder)
    manifest = read_manifest(folder.path)
    assert manifest is not None
    assert "metrics.jsonl" in manifest.files


def test_a_failed_launch_has_a_manifest_too(tmp_path: Path) -> None:
    run, folder = begin(tmp_path)
    with pytest.raises(KeyError), claimed_run_folder(run, resume=True, overwrite=False):
        raise KeyError
    check_run_files(folder)
    assert (folder.path / MANIFEST_NAME).exists()


def test_logs_of_a_run_with_other_nodes_are_not_listed(tmp_path: Path) -> None:
    _, folder = begin(tmp_path)
    write_run_manifest(folder, has_other_nodes=True)
    (folder.logs / "head.jsonl").write_text("123\n456\n")
    check_run_files(folder)
    assert {path.parent.name for path in list_run_files(folder, has_logs=False)} == {"r", "events"}


def test_a_symbolic_link_is_not_listed(tmp_path: Path) -> None:
    _, folder = begin(tmp_path)
    (tmp_path / "outside.json").write_text("{}")
    (folder.path / "results.json").symlink_to(tmp_path / "outside.json")
    assert folder.path / "results.json" not in list_run_files(folder)

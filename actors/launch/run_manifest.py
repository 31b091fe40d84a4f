"""The manifest of a run's folder is written when a launch ends, and checked and removed when the run is resumed.

It does not list folders with their own manifest, pictures, and the files of other programs.
"""

import sqlite3
from contextlib import closing
from pathlib import Path

import structlog

from asterism.configs.atomic_write import DiskError
from asterism.configs.errors import UnusableInput
from asterism.configs.file_manifest import MANIFEST_NAME, find_damage, write_manifest
from asterism.configs.run_folder import RunFolder

_SINGLE_FILES = ("config.toml", "boots", "nodes", "checkpoints/best.json")
_FOLDERS = ("events", "isolation", "logs")
_SUFFIXES = (".json", ".jsonl", ".sqlite", ".sqlite-wal", ".out", ".log")


def check_run_files(folder: RunFolder) -> None:
    """Read all listed files before a resume. Raises UnusableInput for a file that differs from the manifest."""
    if (damage := find_damage(folder.path)) is not None:
        raise UnusableInput(
            f"{damage}; a resumed run would continue with it: restore it from a copy, or delete "
            f"{folder.path / MANIFEST_NAME} to use the files as they are"
        )


def remove_run_manifest(folder: RunFolder) -> None:
    _get_manifest(folder).unlink(missing_ok=True)


def write_first_manifest(folder: RunFolder) -> None:
    """List the files that a launch does not change: a killed launch leaves this manifest. Raises OSError."""
    fixed = folder.config, folder.task_descriptions, folder.data_digests
    write_manifest(folder.path, [path for path in fixed if path.exists()])


def write_run_manifest(folder: RunFolder, *, has_other_nodes: bool) -> None:
    """Write the manifest after the processes of a launch have ended, unless the disk is full.

    With `has_other_nodes` the logs are not listed: those nodes can still append to the logs.
    """
    try:
        for log in folder.events.glob("*.sqlite"):
            with closing(sqlite3.connect(log)) as connection:  # a killed process leaves a write-ahead log
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        write_manifest(folder.path, list_run_files(folder, has_logs=not has_other_nodes))
    except (OSError, sqlite3.Error, DiskError) as error:
        structlog.get_logger().warning("manifest.failed", error=str(error))


def list_run_files(folder: RunFolder, *, has_logs: bool = True) -> list[Path]:
    """List the files that commands read, except checkpoints, generated data and the tokens of the cold start."""
    top = [path for path in folder.path.glob("*.json*") if path not in (folder.utilization, _get_manifest(folder))]
    single = [folder.path / name for name in _SINGLE_FILES]
    deeper = [path for name in _FOLDERS if has_logs or name != "logs" for path in (folder.path / name).glob("*")]
    found = (path for path in [*top, *single, *deeper] if path in single or path.suffix in _SUFFIXES)
    return sorted(path for path in found if path.is_file() and not path.is_symlink())


def _get_manifest(folder: RunFolder) -> Path:
    return folder.path / MANIFEST_NAME

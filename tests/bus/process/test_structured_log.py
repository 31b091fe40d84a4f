"""Tests of writes to a structured log, and of disk errors."""

import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from asterism.bus.process.exit_reason import ExitReason, exit_reason_path, load_exit_reason
from asterism.bus.process.structured_log import LogFile
from asterism.configs.atomic_write import DiskError
from asterism.configs.errors import EXIT_UNUSABLE
from asterism.configs.run_folder import RunFolder


@contextmanager
def limiting_file_size(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_partly_written_line_is_removed(tmp_path: Path) -> None:
    errors: list[DiskError] = []
    with (tmp_path / "one.jsonl").open("ab", buffering=0) as file:
        log = LogFile(file, errors.append)
        log.write(b'{"a": 1}\n')
        with limiting_file_size(12):
            log.write(b'{"b": 2}\n')
        log.write(b'{"c": 3}\n')
    assert (tmp_path / "one.jsonl").read_bytes() == b'{"a": 1}\n{"c": 3}\n'
    assert [str(error) for error in errors] == [f"{tmp_path}/one.jsonl: File too large"]


def test_a_line_that_cannot_be_written_calls_the_disk_error_handler(tmp_path: Path) -> None:
    errors: list[DiskError] = []
    (tmp_path / "full.jsonl").symlink_to("/dev/full")
    with (tmp_path / "full.jsonl").open("ab", buffering=0) as file:
        LogFile(file, errors.append).write(b"line\n")
    assert [str(error) for error in errors] == [f"{tmp_path}/full.jsonl: No space left on device"]


SCRIPT = """
import sys, structlog
from pathlib import Path
from asterism.bus.process.structured_log import configure_logging
from asterism.configs.run_folder import RunFolder
configure_logging(RunFolder(Path(sys.argv[1])), "one")
structlog.get_logger().info("something.happened")
print("not reached")
"""


@pytest.mark.slow
def test_a_process_with_an_unwritable_log_exits_and_writes_the_reason_to_shared_memory(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.logs.mkdir()
    (folder.logs / "one.jsonl").symlink_to("/dev/full")
    reason = exit_reason_path(folder, "one")
    reason.parent.mkdir()
    try:
        with Path("/dev/full").open("w") as full:
            ended = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], stdout=subprocess.PIPE, stderr=full)
        assert ended.returncode == EXIT_UNUSABLE
        assert ended.stdout == b""
        assert load_exit_reason(reason) == ExitReason(f"{folder.logs}/one.jsonl: No space left on device")
    finally:
        reason.unlink()
        reason.parent.rmdir()

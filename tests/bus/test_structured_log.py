"""The file of a structured log, and what becomes of a line that the disk refuses."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bus.last_words import words_of
from bus.structured_log import LogFile
from configs.disk import DiskRefused
from configs.errors import UNUSABLE
from configs.run_folder import RunFolder


@contextmanager
def files_end_at(size: int) -> Iterator[None]:
    """No file of this process grows beyond so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_line_that_the_disk_takes_a_part_of_is_cut_off_again(tmp_path: Path) -> None:
    refused: list[DiskRefused] = []
    with (tmp_path / "one.jsonl").open("ab", buffering=0) as file:
        log = LogFile(file, refused.append)
        log.write(b'{"a": 1}\n')
        with files_end_at(12):
            log.write(b'{"b": 2}\n')
        log.write(b'{"c": 3}\n')
    assert (tmp_path / "one.jsonl").read_bytes() == b'{"a": 1}\n{"c": 3}\n'
    assert [str(error) for error in refused] == [f"{tmp_path}/one.jsonl: File too large"]


def test_a_line_of_which_nothing_can_be_written_leaves_those_before_it(tmp_path: Path) -> None:
    refused: list[DiskRefused] = []
    (tmp_path / "full.jsonl").symlink_to("/dev/full")
    with (tmp_path / "full.jsonl").open("ab", buffering=0) as file:
        LogFile(file, refused.append).write(b"line\n")
    assert [str(error) for error in refused] == [f"{tmp_path}/full.jsonl: No space left on device"]


ENDS = """
import sys, structlog
from pathlib import Path
from bus.structured_log import configure
from configs.run_folder import RunFolder
configure(RunFolder(Path(sys.argv[1])), "one")
structlog.get_logger().info("something.happened")
print("and nobody knows of it")
"""


def test_a_process_whose_log_cannot_be_written_ends_and_says_which_file_in_memory_too(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.logs.mkdir()
    (folder.logs / "one.jsonl").symlink_to("/dev/full")
    words = words_of(folder, "one")
    words.parent.mkdir()
    try:
        with Path("/dev/full").open("w") as full:
            ended = subprocess.run([sys.executable, "-c", ENDS, str(tmp_path)], stdout=subprocess.PIPE, stderr=full)
        assert ended.returncode == UNUSABLE
        assert ended.stdout == b""
        assert words.read_text() == f"{folder.logs}/one.jsonl: No space left on device\n"
    finally:
        words.unlink()
        words.parent.rmdir()

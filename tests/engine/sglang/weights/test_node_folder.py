import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from asterism.engine.sglang.weights.node_folder import NodeFolders
from asterism.engine.weight_transfer.published_bytes import MAX_FOLDERS
from tests.processes import process_state

NEVER = threading.Event()
ENGINES = 8


def write_files(folder: Path) -> None:
    (folder / "weights").write_text("all")


def refuse_to_write(folder: Path) -> None:
    raise AssertionError(f"{folder} is written a second time")


def take(folders: NodeFolders, key: str, write: Callable[[Path], None] = write_files) -> Path:
    folder = folders.acquire(key, write, NEVER)
    assert folder is not None
    assert (folder / "weights").read_text() == "all"
    return folder


def list_versions(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()} - {"lock"}


def test_engines_of_a_node_read_the_same_folder_until_all_have_finished(tmp_path: Path) -> None:
    engines = [NodeFolders(tmp_path) for _ in range(ENGINES)]
    written: list[Path] = []

    def write(folder: Path) -> None:
        written.append(folder)
        write_files(folder)

    def take_version(engine: NodeFolders) -> Path:
        return take(engine, "7-ab", write)

    with ThreadPoolExecutor(ENGINES) as pool:
        folders = set(pool.map(take_version, engines))
    assert (len(folders), len(written)) == (1, 1)
    for engine in engines:
        assert list_versions(tmp_path) == {"7-ab"}
        engine.release()
    assert list_versions(tmp_path) == set()


def test_a_version_stays_until_its_readers_have_finished(tmp_path: Path) -> None:
    slow, fast = NodeFolders(tmp_path), NodeFolders(tmp_path)
    old = take(slow, "1-a")
    take(fast, "2-b")
    fast.release()
    assert (old / "weights").read_text() == "all"
    assert list_versions(tmp_path) == {"1-a"}
    slow.release()
    assert list_versions(tmp_path) == set()


def test_a_third_version_waits_until_an_earlier_version_has_no_readers(tmp_path: Path) -> None:
    first, second, third = (NodeFolders(tmp_path) for _ in range(MAX_FOLDERS + 1))
    take(first, "1-a")
    take(second, "2-b")
    seen: list[set[str]] = []

    def write(folder: Path) -> None:
        write_files(folder)
        seen.append(list_versions(tmp_path))

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(third.acquire, "3-c", write, NEVER)
        first.release()
        assert waiting.result(10) == tmp_path / "3-c"
    assert seen == [{"2-b", "part"}]


def test_a_cancelled_engine_stops_waiting(tmp_path: Path) -> None:
    writing, finish, stop = threading.Event(), threading.Event(), threading.Event()

    def write(folder: Path) -> None:
        writing.set()
        finish.wait(10)
        write_files(folder)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(NodeFolders(tmp_path).acquire, "1-a", write, NEVER)
        writing.wait(10)
        second = pool.submit(NodeFolders(tmp_path).acquire, "1-a", refuse_to_write, stop)
        stop.set()
        assert second.result(10) is None
        finish.set()
        assert first.result(10) == tmp_path / "1-a"


def test_a_failed_write_leaves_no_folder_and_the_next_engine_writes(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        write_files(folder)
        raise OSError("No space left on device")

    with pytest.raises(OSError, match="No space left"):
        NodeFolders(tmp_path).acquire("1-a", fail, NEVER)
    assert list_versions(tmp_path) == set()
    take(NodeFolders(tmp_path), "1-a")


def test_an_engine_without_a_folder_releases_nothing(tmp_path: Path) -> None:
    reader = NodeFolders(tmp_path)
    take(reader, "1-a")
    NodeFolders(tmp_path).release()
    assert list_versions(tmp_path) == {"1-a"}


def test_a_release_after_the_end_of_the_run_does_nothing(tmp_path: Path) -> None:
    folders = NodeFolders(tmp_path / "removed")
    folder = take(folders, "1-a")
    for path in (folder / "weights", tmp_path / "removed" / "lock"):
        path.unlink()
    folder.rmdir()
    folder.parent.rmdir()
    folders.release()
    assert not folder.parent.exists()


# ---------------------------------------------------------------- killed engines

KILLED = """
import os, shutil, signal, sys, threading
from pathlib import Path
from asterism.engine.sglang.weights.node_folder import NodeFolders

root, moment, key = Path(sys.argv[1]), sys.argv[2], sys.argv[3]

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def write(folder):
    (folder / "weights").write_text("half")
    if moment == "writing":
        die()
    (folder / "weights").write_text("all")

folders = NodeFolders(root)
if moment == "before the rename":
    Path.rename = die
folders.acquire(key, write, threading.Event())
if moment == "reading":
    die()
if moment == "waiting":
    print("reading", flush=True)
    sys.stdin.read()

def remove_half(path, **options):
    if Path(path).exists():
        (Path(path) / "weights").unlink()
        die()

shutil.rmtree = remove_half
folders.release()
"""


def run_killed(root: Path, moment: str, key: str) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED, str(root), moment, key], timeout=60)
    assert killed.returncode == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["writing", "before the rename", "reading", "removing"])
def test_folders_of_a_killed_engine_are_replaced_or_read(tmp_path: Path, moment: str) -> None:
    for key in ("1-a", "2-b"):  # the killed version again, and the next version
        run_killed(tmp_path, moment, "1-a")
        assert len(list_versions(tmp_path)) == 1
        is_complete = moment == "reading" and key == "1-a"
        folders = NodeFolders(tmp_path)
        take(folders, key, refuse_to_write if is_complete else write_files)
        assert list_versions(tmp_path) == {key}
        folders.release()
        assert list_versions(tmp_path) == set()


@pytest.mark.slow
def test_the_folder_of_a_killed_reader_is_removed_before_the_next_version(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", KILLED, str(tmp_path), "waiting", "1-a"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == b"reading\n"
        folders = NodeFolders(tmp_path)
        take(folders, "1-a", refuse_to_write)
        folders.release()
        assert list_versions(tmp_path) == {"1-a"}
        os.kill(reader.pid, signal.SIGKILL)
        reader.wait()
        assert process_state(reader.pid) == "X"
    take(folders, "2-b")
    assert list_versions(tmp_path) == {"2-b"}

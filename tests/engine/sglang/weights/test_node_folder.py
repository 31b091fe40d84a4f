import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing import connection
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from asterism.engine.sglang.weights.node_folder import NodeFolders
from asterism.engine.weight_transfer.published_bytes import MAX_FOLDERS

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

_forks = multiprocessing.get_context("fork")


def use_folder_until_killed(root: Path, moment: str, is_reading: Event) -> None:
    """Acquire and release a folder as an engine does, in a process that is killed at the moment."""

    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def write(folder: Path) -> None:
        (folder / "weights").write_text("half")
        if moment == "writing":
            die()
        write_files(folder)

    def remove_half(path: Path, **_: object) -> None:
        if path.exists():
            (path / "weights").unlink()
            die()

    if moment == "before the rename":
        Path.rename = die  # pyright: ignore[reportAttributeAccessIssue]
    folders = NodeFolders(root)
    folders.acquire("1-a", write, NEVER)
    if moment == "reading":
        is_reading.set()
        signal.pause()
    shutil.rmtree = remove_half
    folders.release()


@contextmanager
def killing(root: Path, moment: str) -> Generator[None]:
    """Fork an engine that uses the folder "1-a". In the block it reads the folder, or it has died at an earlier moment."""
    is_reading = _forks.Event()
    engine = _forks.Process(target=use_folder_until_killed, args=(root, moment, is_reading))
    engine.start()
    assert is_reading.wait(60) if moment == "reading" else connection.wait([engine.sentinel], 60)
    yield
    engine.kill()
    engine.join()
    assert engine.exitcode == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["writing", "before the rename", "reading", "removing"])
def test_folders_of_a_killed_engine_are_replaced_or_read(tmp_path: Path, moment: str) -> None:
    for key in ("1-a", "2-b"):  # the killed version again, and the next version
        with killing(tmp_path, moment):
            assert len(list_versions(tmp_path)) == 1
        is_complete = moment == "reading" and key == "1-a"
        folders = NodeFolders(tmp_path)
        take(folders, key, refuse_to_write if is_complete else write_files)
        assert list_versions(tmp_path) == {key}
        folders.release()
        assert list_versions(tmp_path) == set()


@pytest.mark.slow
def test_the_folder_of_a_killed_reader_is_removed_before_the_next_version(tmp_path: Path) -> None:
    folders = NodeFolders(tmp_path)
    with killing(tmp_path, "reading"):
        take(folders, "1-a", refuse_to_write)
        folders.release()
        assert list_versions(tmp_path) == {"1-a"}
    take(folders, "2-b")
    assert list_versions(tmp_path) == {"2-b"}

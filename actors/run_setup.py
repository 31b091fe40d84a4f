"""Taking a run's folder: new, to go on with, or to write over. One run at a time."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from actors.counters import count_one_more
from actors.hosts import check_free
from bus.curve import load_key
from configs.errors import UnusableInput
from configs.load import load_resolved, obstacles, write_resolved
from configs.run_folder import RunFolder
from configs.schema import Run

MIN_FREE_MIB = 64


class RunRefused(UnusableInput):
    """The run cannot have its folder. `str(error)` says why, and which flag helps."""


@contextmanager
def claimed(run: Run, *, resume: bool, overwrite: bool) -> Generator[RunFolder]:
    """The run's folder, with its resolved configuration in it, for this process alone.

    Raises RunRefused, and UnusableInput for a cluster's key or address that cannot be used.
    """
    if resume and overwrite:
        raise RunRefused("--resume goes on with a run and --overwrite deletes it: give one of the two")
    folder = RunFolder(Path(run.runs_folder) / run.name)
    with ExitStack() as held:
        try:
            folder.path.mkdir(parents=True, exist_ok=True)
            lock = held.enter_context(folder.lock.open("a+"))
            _take(lock.fileno(), folder)
            _check_cluster(run)
            _settle(run, folder, resume=resume, overwrite=overwrite)
            _check_room(folder)
            write_resolved(run, folder.config)
            for scratch in (folder.sockets, folder.shared_memory):
                shutil.rmtree(scratch, ignore_errors=True)
                scratch.mkdir(mode=0o700)
                held.callback(shutil.rmtree, scratch, ignore_errors=True)
        except OSError as error:
            raise RunRefused(f"{error.filename or folder.path}: {error.strerror}") from error
        yield folder


def next_boot(folder: RunFolder) -> int:
    """Counts the launches in this folder, from 1."""
    return count_one_more(folder.boots)


def _take(lock: int, folder: RunFolder) -> None:
    """The kernel gives the lock back when this process ends, however it ends."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = folder.lock.read_text().strip()
        raise RunRefused(
            f"{folder.path}: a run is using this folder (process {holder}); --set name=... takes another"
        ) from None
    os.ftruncate(lock, 0)
    os.write(lock, f"{os.getpid()}\n".encode())


def _check_cluster(run: Run) -> None:
    """What the others would need is tried before anything is deleted or written. Raises UnusableInput."""
    if run.cluster.key:
        load_key(Path(run.cluster.key))
        if run.cluster.host:
            check_free(run.cluster.host, run.cluster.port, "cluster.host and cluster.port say where to listen")


def _settle(run: Run, folder: RunFolder, *, resume: bool, overwrite: bool) -> None:
    if not folder.config.exists():
        if resume:
            raise RunRefused(f"{folder.path}: there is no run to resume")
        if foreign := sorted(path.name for path in folder.path.iterdir() if path != folder.lock):
            raise RunRefused(
                f"{folder.path}: this folder is not a run's: it holds {foreign[0]}; --set name=... takes another"
            )
        return
    if overwrite:
        # The configuration goes last: as long as it is there, the folder is known as a run's.
        for path in sorted(folder.path.iterdir(), key=lambda path: path == folder.config):
            if path != folder.lock:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        return
    changed = obstacles(load_resolved(folder.config), run)
    if changed:
        listed = "\n  ".join(changed)
        raise RunRefused(
            f"{folder.path}: this run exists with another configuration:\n  {listed}\n"
            "--overwrite deletes it and begins anew; to --resume it, leave these keys as they were"
        )
    if not resume:
        state = "is finished" if folder.summary.exists() else "was not finished"
        raise RunRefused(f"{folder.path}: this run exists and {state}: --resume goes on, --overwrite begins anew")


def _check_room(folder: RunFolder) -> None:
    free_mib = shutil.disk_usage(folder.path).free >> 20
    if free_mib < MIN_FREE_MIB:
        raise RunRefused(f"{folder.path}: {free_mib} MiB free on this disk; a run needs {MIN_FREE_MIB} at least")

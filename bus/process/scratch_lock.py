"""Scratch folders: files of a process outside its run's folder, such as sockets and shared memory.

The owner holds a file lock in each of its folders. The kernel releases the lock when the owner ends, also after a kill:
a folder with a free lock is stale. The next start of any run of the same user removes the folder, and so does
`asterism doctor`. A link `cgroup` in the folder names a cgroup of the owner, which is removed first. Containers carry
the name of a scratch folder of their owner (asterism.sandbox.hosts.docker.docker_host).
"""

import contextlib
import fcntl
import os
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Generator, Iterator, Set
from pathlib import Path

SHARED_MEMORY_INODES = "shared_memory_inodes"  # file with the inodes of shared memory of the folder's programs
_LOCK_NAME = ".lock"
_PARENTS = (Path("/tmp"), Path("/dev/shm"))  # parents of scratch folders, as well as the temporary folder
_CGROUP_LINK = "cgroup"
_CGROUP_DELAYS_S = (0.0, 0.01, 0.1, 1.0)  # waits between attempts: killed processes leave a cgroup late
_BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")


def name_scratch(suffix: str) -> str:
    return f"asterism-{os.getuid()}-{suffix}"


@contextlib.contextmanager
def holding_scratch(path: Path) -> Generator[Path]:
    """Make and lock a new folder with mode 0700; remove it at the end. Raises OSError, also for a held folder."""
    lock = _create_scratch(path)
    try:
        yield path
    finally:
        _remove_tree(path)
        os.close(lock)


def remove_stale_scratch() -> list[Path]:
    """Remove the stale scratch folders of this user, and return their paths."""
    return [path for path in _list_scratch() if _remove_if_stale(path)]


def unlink_shared_memory(inodes: Set[int]) -> None:
    """Remove this user's files in /dev/shm with these inodes. A name does not identify a file: semaphores are renamed."""
    for file in Path("/dev/shm").iterdir() if inodes else ():
        with contextlib.suppress(OSError):
            status = file.lstat()
            if status.st_ino in inodes and status.st_uid == os.getuid() and stat.S_ISREG(status.st_mode):
                file.unlink()


def link_cgroup(scratch: Path, cgroup: Path) -> None:
    """Remove the cgroup, which has the same name, together with the scratch folder, also after a kill."""
    (scratch / _CGROUP_LINK).symlink_to(cgroup)


def remove_cgroup(cgroup: Path, delays_s: tuple[float, ...] = _CGROUP_DELAYS_S) -> bool:
    """Remove a cgroup and the cgroups below it. Return False if processes are left in a cgroup."""
    for delay_s in delays_s:
        time.sleep(delay_s)
        for folder, _, _ in os.walk(cgroup, topdown=False):
            with contextlib.suppress(OSError):
                Path(folder).rmdir()
        if not cgroup.exists():
            return True
    return False


def name_owner(scratch: Path) -> str:
    """Return a name of the folder's holder that is unique on all machines and mounts that share a Docker engine."""
    return f"{_identify_parent(scratch)}:{scratch}"


def has_owner_ended(owner: str) -> bool:
    """Return whether the owner has ended. False for an owner on another machine, or with an invisible temporary folder."""
    boot, device, inode, path = (owner.split(":", 3) + [""] * 3)[:4]
    scratch = Path(path)
    with contextlib.suppress(OSError):
        return f"{boot}:{device}:{inode}" == _identify_parent(scratch) and not _is_held(scratch)
    return False


def _create_scratch(path: Path) -> int:
    """Make the folder and return the descriptor of its lock. Repeat if another start removes the folder first."""
    while True:
        _remove_if_stale(path, without_lock=True)
        path.mkdir(mode=0o700)
        with contextlib.suppress(FileNotFoundError):
            lock = os.open(path / _LOCK_NAME, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if os.fstat(lock).st_nlink:
                return lock
            os.close(lock)


def _remove_if_stale(path: Path, *, without_lock: bool = False) -> bool:
    """Return whether the folder was removed; a folder without a lock file is kept unless `without_lock`."""
    try:
        lock = os.open(path / _LOCK_NAME, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        if not without_lock or not path.is_dir():
            return False
        return _remove_tree(path)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.fstat(lock).st_nlink > 0 and _remove_tree(path)
    except OSError:  # the lock is held, or the file system has no locks
        return False
    finally:
        os.close(lock)


def _remove_tree(path: Path) -> bool:
    """Remove the folder, the lock file last. Programs can leave trees that are unreadable, or too deep for shutil."""
    for record in (*path.glob(SHARED_MEMORY_INODES), *path.glob(f"*/{SHARED_MEMORY_INODES}")):
        with contextlib.suppress(OSError, ValueError):
            unlink_shared_memory({int(inode) for inode in record.read_text().split()})
    link = path / _CGROUP_LINK
    if link.is_symlink() and link.readlink().name == path.name and not remove_cgroup(link.readlink()):
        return False
    for entry in [entry for entry in path.glob("*") if entry.name != _LOCK_NAME]:
        with contextlib.suppress(OSError, RecursionError):
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
        if os.path.lexists(entry):
            for command in ("chmod", "-R", "u+rwx"), ("rm", "-rf"):
                subprocess.run([*command, entry], stderr=subprocess.DEVNULL, check=False)
    shutil.rmtree(path, ignore_errors=True)
    return not path.exists()


def _is_held(path: Path) -> bool:
    try:
        lock = os.open(path / _LOCK_NAME, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def _list_scratch() -> Iterator[Path]:
    for folder in {Path(tempfile.gettempdir()), *_PARENTS}:
        for path in folder.glob(f"{name_scratch('')}*"):
            with contextlib.suppress(OSError):
                if path.lstat().st_uid == os.getuid() and path.is_dir() and not path.is_symlink():
                    yield path


def _identify_parent(scratch: Path) -> str:
    parent = scratch.parent.stat()
    return f"{_BOOT_ID_FILE.read_text().strip()}:{parent.st_dev}:{parent.st_ino}"

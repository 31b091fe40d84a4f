"""Removes the folders of calls that cannot mount a folder."""
# pathlib and shutil would be mapped into every forked process.
# ruff: noqa: PTH101, PTH106, PTH208

import contextlib
import os
import stat


def remove_folder(folder: str) -> None:
    """Remove a folder, even a hostile tree: deeper than the longest path, or with unreadable folders.

    Nested folders move to the top, level by level: no recursion, no long path. Entries that cannot
    be removed stay.
    """
    try:
        if os.getuid() != 0:
            os.chmod(folder, 0o700)
        top = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return
    lifted, removed = 0, True
    while removed:
        removed = False
        for name in os.listdir(top):
            lifted += _lift(top, name, lifted)
            removed |= _remove(top, name)
    os.close(top)
    with contextlib.suppress(OSError):
        os.rmdir(folder)


def _lift(top: int, name: str, lifted: int) -> int:
    """Remove the files of folder `name`, move its folders to `top`, and return their number."""
    moved = 0
    try:
        _make_accessible(top, name)
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=top)
    except OSError:
        return 0
    for inner in os.listdir(fd):
        if not _remove(fd, inner):
            with contextlib.suppress(OSError):
                _make_accessible(fd, inner)
                os.rename(inner, f".lifted-{os.getpid()}-{lifted + moved}", src_dir_fd=fd, dst_dir_fd=top)
                moved += 1
    os.close(fd)
    return moved


def _make_accessible(folder: int, name: str) -> None:
    """Make a folder accessible; only a user without root needs this. A link's target is never changed."""
    if os.getuid() != 0 and stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
        os.chmod(name, 0o700, dir_fd=folder)


def _remove(folder: int, name: str) -> bool:
    """Remove a file or an empty folder; return whether this succeeded."""
    for remove in (os.unlink, os.rmdir):
        try:
            remove(name, dir_fd=folder)
        except OSError:
            continue
        return True
    return False

"""The folders of calls that cannot mount one: how they go away. Standard library only."""
# pathlib and shutil would be mapped into every forked process.
# ruff: noqa: PTH101, PTH106, PTH208

import contextlib
import os
import stat


def remove_folder(folder: str) -> None:
    """Whatever code has made of it: a tree deeper than a path is long, folders that their owner may not read.

    What is deep is lifted to the top, level by level: no recursion, no long path. Leaves what cannot be removed.
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
    """Empties the folder `name`: removes its files, and moves its folders to `top`. Returns how many these were."""
    moved = 0
    try:
        _open_up(top, name)
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=top)
    except OSError:
        return 0
    for inner in os.listdir(fd):
        if not _remove(fd, inner):
            with contextlib.suppress(OSError):
                _open_up(fd, inner)
                os.rename(inner, f".lifted-{os.getpid()}-{lifted + moved}", src_dir_fd=fd, dst_dir_fd=top)
                moved += 1
    os.close(fd)
    return moved


def _open_up(folder: int, name: str) -> None:
    """Root may look into every folder as it is; and a link's target is nobody's to change."""
    if os.getuid() != 0 and stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
        os.chmod(name, 0o700, dir_fd=folder)


def _remove(folder: int, name: str) -> bool:
    """A file, or an empty folder."""
    for remove in (os.unlink, os.rmdir):
        try:
            remove(name, dir_fd=folder)
        except OSError:
            continue
        return True
    return False

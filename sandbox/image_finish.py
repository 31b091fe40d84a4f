"""Runs in the image while it is built: no setuid bit stays, everything is compiled, and every time is the same.

`image_finish.py [--base] FOLDER`; with `--base`, also for the whole file system and the standard library.
The image's root is read-only later, so what is not compiled now would be compiled again in each process.
"""

import compileall
import os
import py_compile
import re
import stat
import sys
import sysconfig
from pathlib import Path

MODIFIED_AT = 1_735_689_600  # 2025-01-01: a build's own time would make each build another image
_NEVER_IMPORTED = re.compile(r"/(site-packages|dist-packages|ensurepip|idlelib|lib2to3|test)/")


def main(arguments: list[str]) -> None:
    folders = [Path(arguments[-1])]
    if "--base" in arguments:
        strip_setuid(Path("/"))
        folders.append(Path(sysconfig.get_path("stdlib")))
    for folder in folders:
        compile_all(folder)


def strip_setuid(root: Path) -> None:
    """In the file system of `root` alone: /proc and the like are others."""
    device = root.lstat().st_dev
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if Path(folder, name).lstat().st_dev == device]
        for path in (Path(folder, name) for name in files):
            mode = path.lstat().st_mode
            if stat.S_ISREG(mode) and mode & (stat.S_ISUID | stat.S_ISGID):
                path.chmod(stat.S_IMODE(mode) & 0o1777)


def compile_all(folder: Path) -> None:
    """Each module beside its source, as Python looks for it. Such a file names no time, so Python checks none."""
    unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
    compileall.compile_dir(folder, rx=_NEVER_IMPORTED, quiet=2, force=True, invalidation_mode=unchecked, workers=1)
    for cache in folder.rglob("__pycache__"):
        for path in (*cache.iterdir(), cache, cache.parent):
            os.utime(path, (MODIFIED_AT, MODIFIED_AT))


if __name__ == "__main__":
    main(sys.argv[1:])

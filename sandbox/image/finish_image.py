"""Runs in the image during the build: compiles all modules, sets fixed file times, and removes setuid bits.

`finish_image.py [--base] FOLDER` compiles FOLDER; `--base` also compiles the standard library.
The root of a container is read-only: each process would recompile the modules that are not compiled here.
"""

import compileall
import os
import py_compile
import re
import stat
import sys
import sysconfig
from pathlib import Path

MODIFIED_AT = 1_735_689_600  # 2025-01-01; with the time of the build, two images would never be equal
_NEVER_IMPORTED = re.compile(r"/(site-packages|dist-packages|ensurepip|idlelib|lib2to3|test)/")


def main(arguments: list[str]) -> None:
    folders = [Path(arguments[-1])]
    if "--base" in arguments:
        strip_setuid(Path("/"))
        folders.append(Path(sysconfig.get_path("stdlib")))
    for folder in folders:
        compile_all(folder)


def strip_setuid(root: Path) -> None:
    """Remove setuid and setgid bits in the file system of `root`, not in mounts such as /proc."""
    device = root.lstat().st_dev
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if Path(folder, name).lstat().st_dev == device]
        for path in (Path(folder, name) for name in files):
            mode = path.lstat().st_mode
            if stat.S_ISREG(mode) and mode & (stat.S_ISUID | stat.S_ISGID):
                path.chmod(stat.S_IMODE(mode) & 0o1777)


def compile_all(folder: Path) -> None:
    """Compile with unchecked hashes, so that Python does not compare times with the sources."""
    unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
    compileall.compile_dir(folder, rx=_NEVER_IMPORTED, quiet=2, force=True, invalidation_mode=unchecked, workers=1)
    for cache in folder.rglob("__pycache__"):
        for path in (*cache.iterdir(), cache, cache.parent):
            os.utime(path, (MODIFIED_AT, MODIFIED_AT))


if __name__ == "__main__":
    main(sys.argv[1:])

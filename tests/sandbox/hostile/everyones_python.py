"""An interpreter that every user may enter: without namespaces a call of root's is another user, and some lie in root's home."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox import process_backend
from sandbox.inside.import_folders import import_folders


@contextlib.contextmanager
def everyones_python() -> Iterator[None]:
    """As root: the interpreter and its packages, mounted where nothing above them is closed to others."""
    places = [sys.base_prefix, *[folder for folder in import_folders() if not folder.startswith(sys.base_prefix)]]
    if os.getuid() != 0 or not any(_is_closed(Path(place)) for place in places):
        yield
        return
    folder = Path(tempfile.mkdtemp(prefix="hostile-python-"))
    folder.chmod(0o755)
    moved = {place: str(folder / str(number)) for number, place in enumerate(places)}

    def there(path: str) -> str:
        place = next(place for place in places if path.startswith(place))
        return moved[place] + path[len(place) :]

    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as mounts:
        mounts.callback(folder.rmdir)  # and never its content: that is the interpreter, if an unmount should fail
        for place, target in moved.items():
            Path(target).mkdir()
            mounts.callback(Path(target).rmdir)
            subprocess.run(["mount", "--bind", place, target], check=True)
            mounts.callback(subprocess.run, ["umount", "--lazy", target], check=True)
        patch.setattr(process_backend, "_PYTHON", there(os.path.realpath(sys.executable)))
        patch.setattr(process_backend, "import_folders", lambda: tuple(map(there, import_folders())))
        yield


def _is_closed(path: Path) -> bool:
    return any(not parent.stat().st_mode & 0o001 for parent in (path, *path.parents))

"""Mount the interpreter in a public folder: calls of a root executor run as other users."""

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from asterism.sandbox.hosts import local_host as process_backend
from asterism.sandbox.inside.wire.command import list_import_folders


@contextlib.contextmanager
def public_interpreter() -> Iterator[None]:
    """Bind-mount the interpreter and its packages below world-accessible folders, if this process is root."""
    places = [sys.base_prefix, *[folder for folder in list_import_folders() if not folder.startswith(sys.base_prefix)]]
    if os.getuid() != 0 or not any(_is_private(Path(place)) for place in places):
        yield
        return
    folder = Path(tempfile.mkdtemp(prefix="hostile-python-"))
    folder.chmod(0o755)
    moved = {place: str(folder / str(number)) for number, place in enumerate(places)}

    def there(path: str) -> str:
        place = next(place for place in places if path.startswith(place))
        return moved[place] + path[len(place) :]

    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as mounts:
        mounts.callback(folder.rmdir)  # rmtree would delete the interpreter if an unmount failed
        for place, target in moved.items():
            Path(target).mkdir()
            mounts.callback(Path(target).rmdir)
            subprocess.run(["mount", "--bind", place, target], check=True)
            mounts.callback(subprocess.run, ["umount", "--lazy", target], check=True)
        patch.setattr(process_backend, "_PYTHON", there(os.path.realpath(sys.executable)))
        patch.setattr(process_backend, "list_import_folders", lambda: tuple(map(there, list_import_folders())))
        yield


def _is_private(path: Path) -> bool:
    return any(not parent.stat().st_mode & 0o001 for parent in (path, *path.parents))

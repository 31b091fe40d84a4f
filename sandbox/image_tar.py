"""Tar files in which nothing tells when or by whom they were written: the same files give the same bytes."""

from __future__ import annotations

import tarfile
from collections.abc import Callable
from pathlib import Path
from tarfile import TarInfo
from typing import IO

from sandbox.image_finish import MODIFIED_AT


def write_tar(root: Path, stream: IO[bytes], adapt: Callable[[TarInfo], TarInfo | None]) -> None:
    """What lies in `root`, by name. `adapt` changes an entry, or drops it (None) with all that lies below."""

    def undated(entry: TarInfo) -> TarInfo | None:
        entry.mtime = MODIFIED_AT
        entry.uname = entry.gname = ""
        return adapt(entry)

    with tarfile.open(fileobj=stream, mode="w|", format=tarfile.GNU_FORMAT, bufsize=1 << 20) as tar:
        for path in sorted(root.iterdir()):
            tar.add(path, arcname=path.name, filter=undated)

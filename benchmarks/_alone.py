"""What the sandbox is measured against: a fresh interpreter for each call."""

from __future__ import annotations

import os
import subprocess
import sysconfig
import time
import venv
from pathlib import Path


class ProcessPerCall:
    """`subprocess.run` per call, in an empty virtual environment that sees the installed packages and nothing more.

    This project's own environment would start more slowly: an editable install adds an import hook to each start.
    """

    def __init__(self, folder: Path) -> None:
        venv.create(folder, symlinks=True)
        self._python = str(folder / "bin" / "python")
        self._environment = {
            "PATH": os.environ.get("PATH", ""),
            "PYTHONPATH": sysconfig.get_paths()["purelib"],
            "OPENBLAS_NUM_THREADS": "1",
        }

    def seconds(self, code: str, printed: str, calls: int) -> float:
        """That so many calls take, one after the other."""
        started = time.perf_counter()
        for _ in range(calls):
            done = subprocess.run(
                [self._python, "-c", code], env=self._environment, capture_output=True, check=True, text=True
            )
            assert done.stdout == printed, done
        return time.perf_counter() - started

"""The baseline of the sandbox benchmark: a fresh interpreter for each call."""

from __future__ import annotations

import os
import subprocess
import sysconfig
import time
import venv
from pathlib import Path


class ProcessPerCall:
    """`subprocess.run` per call, in a virtual environment with the installed packages only.

    This project's own environment starts more slowly: an editable install adds an import hook.
    """

    def __init__(self, folder: Path) -> None:
        venv.create(folder, symlinks=True)
        self._python = str(folder / "bin" / "python")
        self._environment = {
            "PATH": os.environ.get("PATH", ""),
            "PYTHONPATH": sysconfig.get_paths()["purelib"],
            "OPENBLAS_NUM_THREADS": "1",
        }

    def measure_seconds(self, code: str, printed: str, calls: int) -> float:
        """Return the seconds of `calls` sequential calls."""
        started = time.perf_counter()
        for _ in range(calls):
            done = subprocess.run(
                [self._python, "-c", code], env=self._environment, capture_output=True, check=True, text=True
            )
            assert done.stdout == printed, done
        return time.perf_counter() - started

"""A disk that a test may fill: a tmpfs in a mount namespace of its own, which nobody else sees."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path
from types import TracebackType

from tests.actors.running import ROOT, command_line


class SmallDisk:
    """A context manager: at its end so do the runs on it. Mounted at `at` for those that enter."""

    def __init__(self, at: Path, mib: int) -> None:
        self.at = at
        self._mib = mib
        self._launched: list[subprocess.Popen[str]] = []

    def __enter__(self) -> SmallDisk:
        script = f"mount -t tmpfs -o size={self._mib}m small '{self.at}'; echo; exec cat"
        self._holder = subprocess.Popen(
            ["unshare", "--mount", "sh", "-ec", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == b"\n", "no namespace; the reason is in what was printed"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._launched:
            process.kill()
            process.communicate()
        self._holder.communicate()

    def seen(self, path: Path) -> Path:
        """A file on the disk, from outside."""
        return Path(f"/proc/{self._holder.pid}/root") / path.relative_to("/")

    def entering(self, *words: str) -> list[str]:
        """A command line that runs the words where the disk is mounted, as the process that is started."""
        return ["nsenter", f"--target={self._holder.pid}", "--mount", f"--wdns={ROOT}", *words]

    def launch(self, *words: str) -> subprocess.Popen[str]:
        """A small run with its folder on the disk (tests.actors.running.launch)."""
        argv = self.entering(*command_line(self.at, *words))
        process = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self._launched.append(process)
        return process

    def asterism(self, *words: str) -> str:
        """What it printed. Raises CalledProcessError if it failed."""
        argv = self.entering(sys.executable, "-m", "actors.cli", *words)
        return subprocess.run(argv, check=True, capture_output=True, text=True).stdout

    @property
    def _filler(self) -> Path:
        return self.seen(self.at / "filler")

    def fill(self, left_kib: int = 0) -> None:
        """But for so much."""
        with self._filler.open("ab", buffering=0) as file:
            for size in (1 << 20, 1 << 12):
                with contextlib.suppress(OSError):
                    while file.write(bytes(size)) == size:
                        pass
            file.truncate(file.tell() - (left_kib << 10))

    def empty(self) -> None:
        """Takes the filler away."""
        self._filler.unlink()

"""A test can fill this disk: a tmpfs in a private mount namespace."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path
from types import TracebackType

from tests.actors.runs.running import ROOT, command_line, start_command


class SmallDisk:
    """A context manager that kills its runs at the end. The disk is mounted at `at` inside the namespace."""

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
        assert self._holder.stdout.readline() == b"\n", "no namespace; the reason is in the output"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._launched:
            process.kill()
            process.communicate()
        self._holder.communicate()

    def resolve(self, path: Path) -> Path:
        """Return the path of a file on the disk from outside."""
        return Path(f"/proc/{self._holder.pid}/root") / path.relative_to("/")

    def build_enter_argv(self, *arguments: str) -> list[str]:
        """Build a command line that runs `arguments` in the namespace, without an additional process."""
        return ["nsenter", f"--target={self._holder.pid}", "--mount", f"--wdns={ROOT}", *arguments]

    def launch(self, *arguments: str) -> subprocess.Popen[str]:
        """Start a small run with its folder on the disk (tests.actors.runs.running.launch)."""
        process = start_command(self.build_enter_argv(*command_line(self.at, *arguments)))
        self._launched.append(process)
        return process

    def asterism(self, *arguments: str) -> str:
        """Return the output of a command. Raises CalledProcessError."""
        argv = self.build_enter_argv(sys.executable, "-m", "asterism.actors.cli.main", *arguments)
        return subprocess.run(argv, check=True, capture_output=True, text=True).stdout

    @property
    def _filler(self) -> Path:
        return self.resolve(self.at / "filler")

    def fill(self, left_kib: int = 0) -> None:
        """Fill the disk except for `left_kib`."""
        with self._filler.open("ab", buffering=0) as file:
            for size in (1 << 20, 1 << 12):
                with contextlib.suppress(OSError):
                    while file.write(bytes(size)) == size:
                        pass
            file.truncate(file.tell() - (left_kib << 10))

    def empty(self) -> None:
        """Remove the file that fills the disk."""
        self._filler.unlink()

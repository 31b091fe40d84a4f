"""The processes of one server: a group of which the first was started here, and what it printed last."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

_READ_BYTES = 16_384
_WORKER = "sglang::"  # what SGLang calls those of its processes whose end is the end of all
_MEMORY = Path("/dev/shm")
_SHARED = re.compile(rf"(\d+) +{_MEMORY}/(?:sglang_|sem\.)")  # its inode: semaphores are renamed after they are mapped


class ProcessGroup:
    def __init__(self, first: asyncio.subprocess.Process) -> None:
        """`first` is the group's leader."""
        self.first = first
        self._shared: set[int] = set()  # inodes of memory that has a name, and is left behind when it is killed

    def members(self) -> Iterator[int]:
        """Those that have not ended."""
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                state, _, group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
                if int(group) == self.first.pid and state not in "ZX":
                    yield int(entry.name)

    def named(self) -> dict[int, str]:
        """Those that have not ended, with the first words of their command lines."""
        found: dict[int, str] = {}
        for pid in sorted(self.members()):
            with contextlib.suppress(OSError):
                line = Path(f"/proc/{pid}/cmdline").read_bytes()
                found[pid] = line.partition(b"\0")[0].decode(errors="replace").strip()
        return found

    def workers(self) -> dict[int, str]:
        """Schedulers and detokenizers, with their names. What memory they share is noted, for the end."""
        self._note_shared()
        return {pid: name for pid, name in self.named().items() if name.startswith(_WORKER)}

    async def ended(self, pid: int) -> None:
        """Returns when the process has, at once where there is none."""
        loop = asyncio.get_running_loop()
        try:
            watched = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        over = loop.create_future()
        try:
            loop.add_reader(watched, lambda: over.done() or over.set_result(None))
            await over
        finally:
            loop.remove_reader(watched)
            os.close(watched)

    def signal(self, number: signal.Signals) -> None:
        """To all of them."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.first.pid, number)

    async def end(self, within_s: float) -> bool:
        """Whether it ended by itself within so long after SIGTERM. All are gone when this returns."""
        self._note_shared()
        with contextlib.suppress(ProcessLookupError):
            self.first.send_signal(signal.SIGTERM)
        by_itself = True
        try:
            await asyncio.wait_for(self.first.wait(), within_s)
        except TimeoutError:
            by_itself = False
        left = list(self.members())
        self.signal(signal.SIGKILL)
        await asyncio.gather(self.first.wait(), *map(self.ended, left))
        self._unlink_shared()
        return by_itself

    def _note_shared(self) -> None:
        for pid in self.members():
            with contextlib.suppress(OSError):
                self._shared |= {int(inode) for inode in _SHARED.findall(Path(f"/proc/{pid}/maps").read_text())}

    def _unlink_shared(self) -> None:
        for file in (*_MEMORY.glob("sglang_*"), *_MEMORY.glob("sem.*")):
            with contextlib.suppress(FileNotFoundError):
                if file.stat().st_ino in self._shared:
                    file.unlink()


def words(log: Path, lines: int = 12) -> str:
    """The last lines. Raises OSError."""
    with log.open("rb") as stream:
        stream.seek(max(0, log.stat().st_size - _READ_BYTES))
        return "\n".join(stream.read().decode(errors="replace").rstrip().splitlines()[-lines:])

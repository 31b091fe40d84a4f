"""The process group of one server, and the tail of its log."""

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

from asterism.bus.process.scratch_lock import SHARED_MEMORY_INODES, unlink_shared_memory
from asterism.bus.process.waiting import wait_for_exit

_TAIL_BYTES, _TAIL_LINES = 16_384, 12
# Process titles of schedulers and detokenizers; a server without one of them is dead.
_WORKER_PREFIX = "sglang::"
# An inode identifies a mapping, because semaphores are renamed after they are mapped.
_SHM_MAPPING = re.compile(r"(\d+) +/dev/shm/(?:sglang_|psm_|sem\.)")


class ProcessGroup:
    def __init__(self, leader: asyncio.subprocess.Process, scratch: Path) -> None:
        """`scratch`: a path below a scratch folder (asterism.bus.process.scratch_lock)."""
        self.leader = leader
        # Inodes of named shared memory, which killed processes leave in /dev/shm. If this process is killed too, the
        # next start of any run reads the inodes from the file.
        self._shared_memory_inodes: set[int] = set()
        self._inodes_file = scratch / SHARED_MEMORY_INODES

    def list_members(self) -> Iterator[int]:
        """Yield the pids of the live processes."""
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                state, _, group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
                if int(group) == self.leader.pid and state not in "ZX":
                    yield int(entry.name)

    def get_process_names(self) -> dict[int, str]:
        """Return the first argument of each live process's command line, by pid."""
        found: dict[int, str] = {}
        for pid in sorted(self.list_members()):
            with contextlib.suppress(OSError):
                line = Path(f"/proc/{pid}/cmdline").read_bytes()
                found[pid] = line.partition(b"\0")[0].decode(errors="replace").strip()
        return found

    def find_workers(self) -> dict[int, str]:
        """Return the names of schedulers and detokenizers by pid. Also records shared memory for cleanup."""
        self._record_shared_memory()
        return {pid: name for pid, name in self.get_process_names().items() if name.startswith(_WORKER_PREFIX)}

    def send_signal(self, number: signal.Signals) -> None:
        """Send the signal to all processes of the group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.leader.pid, number)

    async def terminate(self, grace_s: float) -> bool:
        """Terminate the group; return whether the leader exited within `grace_s` after SIGTERM. No process is left."""
        self._record_shared_memory()
        with contextlib.suppress(ProcessLookupError):
            self.leader.send_signal(signal.SIGTERM)
        exited_in_time = True
        try:
            await asyncio.wait_for(self.leader.wait(), grace_s)
        except TimeoutError:
            exited_in_time = False
        remaining = list(self.list_members())
        self.send_signal(signal.SIGKILL)
        await asyncio.gather(self.leader.wait(), *map(wait_for_exit, remaining))
        unlink_shared_memory(self._shared_memory_inodes)
        return exited_in_time

    def _record_shared_memory(self) -> None:
        num_known = len(self._shared_memory_inodes)
        for pid in self.list_members():
            with contextlib.suppress(OSError):
                self._shared_memory_inodes |= {
                    int(inode) for inode in _SHM_MAPPING.findall(Path(f"/proc/{pid}/maps").read_text())
                }
        if len(self._shared_memory_inodes) > num_known:
            with contextlib.suppress(OSError):
                self._inodes_file.write_text("\n".join(map(str, self._shared_memory_inodes)))


def read_log_tail(log: Path) -> str:
    """Return the last lines of the log. Raises OSError."""
    with log.open("rb") as stream:
        stream.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        return "\n".join(stream.read().decode(errors="replace").rstrip().splitlines()[-_TAIL_LINES:])

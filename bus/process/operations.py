"""The operations that a process runs, and their start times, in a small file that the launcher reads.

The launcher reports a hanging operation, and restarts a process that sends heartbeats but makes no progress.
Heartbeats do not suffice: the last one is older than the operation in which a process was stopped.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from asterism.configs.run_folder import RunFolder


class RunningOperation(msgspec.Struct, frozen=True):
    name: str
    start: float  # time of time.monotonic, which all processes of a machine share
    limit_s: float = 0.0  # a longer operation counts as hung; 0: no limit

    def get_elapsed_s(self) -> float:
        return time.monotonic() - self.start


class _OperationFile(msgspec.Struct, frozen=True):
    incarnation: int
    operations: tuple[RunningOperation, ...]


def operations_path(folder: RunFolder, process: str) -> Path:
    """Return the path of the file, on a tmpfs."""
    return folder.shared_memory / f"{process}.operations"


def load_operations(path: Path, incarnation: int) -> Sequence[RunningOperation]:
    """Return the running operations, outer before inner ones; empty if this incarnation has written no file."""
    try:
        content = msgspec.json.decode(path.read_bytes(), type=_OperationFile)
    except FileNotFoundError:
        return ()
    return content.operations if content.incarnation == incarnation else ()


def describe_operations(operations: Sequence[RunningOperation]) -> str:
    """Return a description such as "in save since 14.0 s, in barrier since 13.9 s"; empty for no operations."""
    return ", ".join(f"in {each.name} since {each.get_elapsed_s():.1f} s" for each in operations)


class OperationRecord:
    """The running operations of all threads, in the order of their starts.

    `failed` describes the operations that ran when the first exception was raised in an operation.
    """

    def __init__(self, limit_s: float = 0.0, path: Path | None = None, incarnation: int = 1) -> None:
        """Make a record. `limit_s`: limit of operations with a limit; 0: no limit. `path`: the file; None: no file."""
        self.failed = ""
        self._limit_s = limit_s
        self._path = path
        self._incarnation = incarnation
        self._lock = threading.Lock()
        self._running: list[RunningOperation] = []

    @property
    def running(self) -> Sequence[RunningOperation]:
        with self._lock:
            return tuple(self._running)

    def close(self) -> None:
        """Remove the file."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    @contextmanager
    def run(self, name: str, *, is_limited: bool = True) -> Generator[None]:
        """Record the operation `name`, which the caller runs while the context is open."""
        operation = RunningOperation(name, time.monotonic(), self._limit_s if is_limited else 0.0)
        self._change(lambda: self._running.append(operation))
        try:
            yield
        except Exception:
            self.failed = self.failed or describe_operations(self.running)
            raise
        finally:
            self._change(lambda: self._running.remove(operation))

    def _change(self, change: Callable[[], None]) -> None:
        with self._lock:
            change()
            if self._path is not None:
                self._write(self._path)

    def _write(self, path: Path) -> None:
        partial = path.with_suffix(".partial")
        content = msgspec.json.encode(_OperationFile(self._incarnation, tuple(self._running)))
        with contextlib.suppress(OSError):  # a full disk, or the launcher has removed the folder
            partial.write_bytes(content)
            partial.replace(path)

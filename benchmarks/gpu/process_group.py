"""Runs a program in its own process group with a time limit, and leaves none of its processes behind.

The launcher starts some processes in new sessions, outside the group. After `adopt_orphans` this program becomes the
parent of orphaned descendants, and kills them too.
"""

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import IO, NamedTuple, NoReturn

from asterism.bus.process.parent_death import PARENT_PID_VARIABLE

ROOT = Path(__file__).parents[2]  # root of the checkout
MEMORY_VARIABLE = "ASTERISM_BENCHMARK_MEMORY"  # the folder of a section's files in shared memory
_KERNELS_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.05
MAX_ERROR = 2000  # length of the kept end of an error, in characters
_END_S = 20.0  # seconds to wait for killed processes; a process in a broken driver might never end


class Finished(NamedTuple):
    code: int | None  # None: killed at the limit
    output: str
    errors: str
    seconds: float

    @property
    def last_error(self) -> str:
        """The end of stderr, or the exit code if stderr is empty. A program killed at its limit has no exit code."""
        has_ended = self.code is not None
        return self.errors.strip()[-MAX_ERROR:] or (f"exit code {self.code}" if has_ended else "")


def adopt_orphans() -> None:
    """Make this process the parent of its orphaned descendants, and raise SystemExit on SIGTERM."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, _exit_on_signal)


def build_environment() -> dict[str, str]:
    """Return an environment with the checkout on Python's path, so that the project needs no installation.

    All programs share one folder of compiled kernels. torch cannot choose that folder for a user without a name.
    """
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    kernels = os.environ.get(_KERNELS_VARIABLE) or str(Path(tempfile.gettempdir()) / f"torchinductor_{os.getuid()}")
    return {**os.environ, "PYTHONPATH": path, PARENT_PID_VARIABLE: str(os.getpid()), _KERNELS_VARIABLE: kernels}


@contextmanager
def holding_temporary_folders() -> Generator[dict[str, str]]:
    """Yield variables with folders for a program's temporary files. The files are removed even after a kill."""
    memory = Path("/dev/shm")
    with ExitStack() as stack:
        parents = {"TMPDIR": None, MEMORY_VARIABLE: memory if memory.is_dir() else None}
        yield {
            name: stack.enter_context(tempfile.TemporaryDirectory(dir=parent, ignore_cleanup_errors=True))
            for name, parent in parents.items()
        }


def build_command(*arguments: str) -> list[str]:
    """Build a command for the environment of `build_environment`; the kernel kills the process when its parent dies."""
    return [sys.executable, "-P", "-m", "asterism.bus.process.parent_death", sys.executable, "-P", *arguments]


def run_limited(arguments: list[str], limit_s: float, *, progress: Path | None = None) -> Finished:
    """Run Python with `arguments`. With a file `progress`, show the output, and restart the limit if the file changes.

    When the call returns, or raises SystemExit on SIGTERM, all descendants of this process are dead.
    """
    began = time.monotonic()
    with holding_temporary_folders() as scratch, tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            build_command(*arguments),
            cwd=ROOT,
            env=build_environment() | scratch,
            stdin=subprocess.DEVNULL,
            stdout=output if progress is None else None,
            stderr=errors,
            process_group=0,
        )
        try:
            code = _wait(process, limit_s, progress)
        finally:
            _end_group(process)
        return Finished(code, _read(output), _read(errors), time.monotonic() - began)


def _wait(process: subprocess.Popen[bytes], limit_s: float, progress: Path | None) -> int | None:
    """Return the exit code, or None at the limit."""
    deadline, size = time.monotonic() + limit_s, _get_size(progress)
    while (code := process.poll()) is None:
        if (new_size := _get_size(progress)) != size:
            deadline, size = time.monotonic() + limit_s, new_size
        if time.monotonic() > deadline:
            return None
        time.sleep(_POLL_S)
    return code


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill the group and all other descendants. Signals during this time have no effect."""
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGTERM, signal.SIGINT)}
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    deadline = time.monotonic() + _END_S
    while (children := list(_list_children())) and time.monotonic() < deadline:
        for child in children:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(child, os.WNOHANG)
        time.sleep(_POLL_S)
    process.poll()
    for number, handler in handlers.items():
        signal.signal(number, handler)


def _list_children() -> Iterator[int]:
    """List the children of this process. A dead child is listed until this process has waited for it."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # the process has ended
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[1]) == os.getpid():
                yield int(path.parent.name)


def _exit_on_signal(number: int, _frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


def _get_size(path: Path | None) -> int:
    return path.stat().st_size if path is not None and path.exists() else 0


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")

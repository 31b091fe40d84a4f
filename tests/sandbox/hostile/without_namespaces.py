"""Programs that the process backend cannot stop without user namespaces; `doctor` warns of each program.

Landlock stops some of these programs; versions are ABI versions (asterism.sandbox.inside.isolation.landlock).
"""

from typing import NamedTuple

from tests.sandbox.hostile.record import Ending, ok, printed, timed_out

_NEVER = 1_000


class KnownEscape(NamedTuple):
    reason: str
    warning: str  # part of the warning that `doctor` prints
    ends: tuple[Ending, ...]  # allowed outcomes without namespaces
    landlock_stops_since: int = _NEVER


class NotRun(NamedTuple):
    """A program that does not run, because it would leave files or kill the tests."""

    reason: str
    landlock_stops_since: int = _NEVER


_DISK = "its folder is on the machine's disk"
_FILES = "these files are world-readable"

KNOWN_ESCAPES = {
    "fills the disk": KnownEscape(_DISK, "fill the disk", (printed(""), timed_out(""))),
    "keeps unlinked files": KnownEscape(_DISK, "fill the disk", (printed(""), timed_out(""))),
    "asks which of the machine's files exist": KnownEscape("Landlock does not restrict stat", "files", (ok(),)),
    "searches for other processes": KnownEscape("process ids are the machine's", "processes", (ok(),)),
    "links to files outside its folder": KnownEscape(_FILES, "files", (ok(),), landlock_stops_since=1),
    "reads the machine's files": KnownEscape(_FILES, "files", (ok(),), landlock_stops_since=1),
    "reads the kernel's files": KnownEscape(_FILES, "files", (ok(), timed_out()), landlock_stops_since=1),
    "reads the environment, arguments and memory of processes": KnownEscape(
        "/proc shows all processes' arguments", "processes", (ok(),), 1
    ),
}

NOT_RUN = {
    "creates files without end": NotRun("the machine's disk has enough inodes"),
    "writes outside its folder": NotRun("the machine's temporary folders are world-writable", 1),
    "writes to the machine's temporary folders": NotRun("these folders are world-writable", 1),
}
_SIGNALS = NotRun("it would kill the tests, which run as the same user", 6)


def get_skip_reason(name: str, signals_others: bool, calls_are_users: bool, landlock: int) -> str:
    """Return the reason for a skip; empty if the program can run."""
    not_run = NOT_RUN.get(name) or (_SIGNALS if signals_others and not calls_are_users else None)
    return not_run.reason if not_run is not None and landlock < not_run.landlock_stops_since else ""

"""Which programs the process backend cannot stop where it has no user namespaces; `doctor` warns of each.

With Landlock fewer get through; versions are those of its interface (sandbox.inside.landlock).
"""

from __future__ import annotations

from typing import NamedTuple

from tests.sandbox.hostile.record import Ending, ok, printed, timed_out

_NEVER = 1_000


class Through(NamedTuple):
    reason: str
    warning: str  # what `doctor` says of it
    ends: tuple[Ending, ...]  # what it comes to then
    stopped_by_landlock: int = _NEVER  # from this version on


class NotRun(NamedTuple):
    """It would get through and leave something behind, or end the tests."""

    reason: str
    stopped_by_landlock: int = _NEVER


_DISK = "its folder lies on the machine's disk"
_FILES = "users may read these files"

GETS_THROUGH = {
    "fills the disk": Through(_DISK, "fill the disk", (printed(""), timed_out(""))),
    "keeps files that have no name": Through(_DISK, "fill the disk", (printed(""), timed_out(""))),
    "asks which of the machine's files exist": Through(
        "Landlock does not count it as reading to ask for a file's kind and size", "files", (ok(),)
    ),
    "asks who else is there": Through("process ids are the machine's", "processes", (ok(),)),
    "links to what is not its own": Through(_FILES, "files", (ok(),), stopped_by_landlock=1),
    "reads the machine's files": Through(_FILES, "files", (ok(),), stopped_by_landlock=1),
    "reads the kernel's files": Through(_FILES, "files", (ok(), timed_out()), stopped_by_landlock=1),
    "reads the environment, arguments and memory of processes": Through(
        "users may read all processes' arguments, and root's calls those of each other", "processes", (ok(),), 1
    ),
}

NOT_RUN = {
    "makes files without number": NotRun("the machine's disk has inodes for all of them"),
    "writes outside its folder": NotRun("everybody may write to the machine's temporary folders", 1),
    "writes to the machine's temporary folders": NotRun("everybody may write to them", 1),
}
_SIGNALS = NotRun("where calls are not users of their own, it would end the tests", 6)


def reason_not_to_run(name: str, signals_others: bool, calls_are_users: bool, landlock: int) -> str:
    """Empty: run it."""
    not_run = NOT_RUN.get(name) or (_SIGNALS if signals_others and not calls_are_users else None)
    return not_run.reason if not_run is not None and landlock < not_run.stopped_by_landlock else ""

"""Which programs the process backend cannot stop where it has no user namespaces; `doctor` warns of each.

With Landlock fewer get through, and the more the newer it is.
"""

from __future__ import annotations

from typing import NamedTuple

from tests.sandbox.hostile.record import Ending, ok, printed, timed_out

_ALWAYS = 1_000  # no version of Landlock stops it


class Through(NamedTuple):
    reason: str
    warning: str  # what `doctor` says of it
    ends: tuple[Ending, ...]  # what it comes to then; empty: anything but what it must come to with namespaces
    stopped_by: int = _ALWAYS  # Landlock's version


GETS_THROUGH = {
    "fills the disk": Through("its folder lies on the machine's disk", "fill the disk", (printed(""), timed_out(""))),
    "keeps files that have no name": Through(
        "its folder lies on the machine's disk", "fill the disk", (printed(""), timed_out(""))
    ),
    "asks which of the machine's files exist": Through(
        "to ask for a file's kind and size is no reading to Landlock", "see which files", (ok(),)
    ),
    "asks who else is there": Through("process ids are the machine's", "processes exist", (ok(),)),
}

NOT_RUN_HERE = {
    "makes files without number": "the machine's disk has inodes for all of them",
}

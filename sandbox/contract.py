"""What every sandbox does, whatever it is made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn, Protocol

import msgspec

from bus.messages import AnswerSubmitted, CodeOutcome, CodeRequested


class SandboxFailure(Exception):
    """The infrastructure broke: this is nobody's answer. `str(error)` is the cause, short and without numbers that vary."""


class Isolation(msgspec.Struct, frozen=True):
    """What stands between a call and the machine, as it is in force."""

    backend: str
    namespaces: tuple[str, ...]  # of "user", "pid", "mount", "network", "ipc"; empty where the kernel refuses
    seccomp: bool
    missing: tuple[str, ...]  # one sentence for each protection that is not in force, with its remedy
    landlock: int = 0  # the version of the rules in force; 0 for none


class CodeResult(msgspec.Struct, frozen=True):
    outcome: CodeOutcome
    duration_s: float  # from the start of execution, not of queueing


class Grade(msgspec.Struct, frozen=True):
    correct: bool
    duration_s: float


class Sandbox(Protocol):
    """Calls run side by side; those of one trajectory's notebook run in the order in which they were asked for."""

    async def start(self) -> Isolation:
        """Raises SandboxFailure if nothing can be run here."""
        ...

    async def run(self, call: CodeRequested) -> CodeResult:
        """Raises SandboxFailure. `jupyter_code` keeps the trajectory's names between calls."""
        ...

    async def grade(self, submission: AnswerSubmitted) -> Grade:
        """Whether the answer equals the ground truth. Raises SandboxFailure if the grader hangs or dies."""
        ...

    async def until_broken(self) -> NoReturn:
        """Raises SandboxFailure when nothing can be run any more, and nobody here can mend it."""
        ...

    def restore_session(self, trajectory_id: int, cells: Sequence[CodeRequested]) -> None:
        """The notebook that a trajectory, which has none here, had elsewhere. Its cells run again, unseen, when the next
        call needs what they did."""
        ...

    async def end_session(self, trajectory_id: int) -> None:
        """Forget the trajectory's notebook, and stop what still runs in it."""
        ...

    async def close(self) -> None:
        """Leaves no process, file or socket behind."""
        ...

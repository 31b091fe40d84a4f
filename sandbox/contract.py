"""The interface that every sandbox implements, whatever its backend."""

from collections.abc import Sequence
from typing import NoReturn, Protocol

import msgspec

from asterism.bus.messages import AnswerSubmitted, CodeOutcome, CodeRequested


class SandboxFailure(Exception):
    """The infrastructure failed. `str(error)` is a short cause without varying numbers."""


class Isolation(msgspec.Struct, frozen=True):
    """The protections in force between a call and the machine."""

    backend: str
    namespaces: tuple[str, ...]  # of NAMESPACE_NAMES; empty where the kernel refuses
    seccomp: bool
    missing: tuple[str, ...]  # a sentence with a remedy for each protection that is off
    landlock: int = 0  # Landlock ABI version in force; 0: off
    call_cgroups: bool = False  # the kernel enforces the memory limit of a call; else the fork server does
    kernel_users: bool = (
        False  # each call has a kernel user of its own; else calls share what the kernel counts by user
    )


class CodeResult(msgspec.Struct, frozen=True):
    outcome: CodeOutcome
    duration_s: float  # from the start of execution, without queueing


class Grade(msgspec.Struct, frozen=True):
    correct: bool
    duration_s: float


class CodeSandbox(Protocol):
    """The calls of a started sandbox, in this process or served by another one.

    Calls run concurrently; cells of one trajectory's notebook run in the order of requests.
    """

    async def run(self, call: CodeRequested) -> CodeResult:
        """Raises SandboxFailure. `jupyter_code` keeps the trajectory's variables between calls.

        Cancellation stops the call; its notebook continues from the cells before it.
        """
        ...

    async def grade(self, submission: AnswerSubmitted) -> Grade:
        """Whether answer and truth are equal. Raises SandboxFailure if the grader hangs or dies."""
        ...

    def restore_notebook(self, trajectory_id: int, cells: Sequence[CodeRequested]) -> None:
        """Adopts a notebook; its cells run again, without output, before the next cell."""
        ...

    async def end_notebook(self, trajectory_id: int) -> None:
        """Delete the trajectory's notebook and end its process."""
        ...


class Sandbox(CodeSandbox, Protocol):
    async def start(self) -> Isolation:
        """Raises SandboxFailure if no code can run on this machine."""
        ...

    async def wait_until_broken(self) -> NoReturn:
        """Raises SandboxFailure when no code can run any more and retries do not help."""
        ...

    async def close(self) -> None:
        """Leaves no process, file or socket behind."""
        ...

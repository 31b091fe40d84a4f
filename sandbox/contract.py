"""The interface that every sandbox implements, whatever its backend."""

from collections.abc import Sequence
from typing import NoReturn, Protocol

import msgspec

from asterism.bus.messages import AnswerSubmitted, CodeOutcome, CodeRequested


class SandboxFailure(Exception):
    """A failure of the infrastructure. `str(error)` is a short cause without varying numbers."""


class Isolation(msgspec.Struct, frozen=True):
    """The protections in force between a call and the machine."""

    backend: str
    namespaces: tuple[str, ...]  # names from NAMESPACE_NAMES; empty if the kernel refuses namespaces
    seccomp: bool
    missing: tuple[str, ...]  # a sentence with a remedy for each protection that is off
    landlock: int = 0  # Landlock ABI version in force; 0: off
    call_cgroups: bool = False  # the kernel enforces a call's memory limit; otherwise the fork server enforces it
    kernel_users: bool = False  # each call has its own kernel user; otherwise calls share the kernel's counts per user


class CodeResult(msgspec.Struct, frozen=True):
    outcome: CodeOutcome
    duration_s: float  # time from the start of execution, without queueing


class Grade(msgspec.Struct, frozen=True):
    correct: bool
    duration_s: float


class CodeSandbox(Protocol):
    """The calls of a started sandbox, in this process or served by another one.

    Calls run concurrently; cells of one trajectory's notebook run in the order of requests.
    """

    async def run(self, call: CodeRequested) -> CodeResult:
        """Run a call; `jupyter_code` calls of a trajectory share their variables. Raises SandboxFailure.

        Cancellation stops the call. The notebook keeps the state from before the call.
        """
        ...

    async def grade(self, submission: AnswerSubmitted) -> Grade:
        """Return whether answer and truth are equal. Raises SandboxFailure if the grader hangs or crashes."""
        ...

    def restore_notebook(self, trajectory_id: int, cells: Sequence[CodeRequested]) -> None:
        """Adopt a notebook; its cells run again, without output, before the next cell."""
        ...

    async def end_notebook(self, trajectory_id: int) -> None:
        """Delete the trajectory's notebook and end its process."""
        ...


class Sandbox(CodeSandbox, Protocol):
    async def start(self) -> Isolation:
        """Start the sandbox. Raises SandboxFailure if no code can run on this machine."""
        ...

    async def wait_until_broken(self) -> NoReturn:
        """Wait until no code can run any more and retries do not help; then raise SandboxFailure."""
        ...

    async def close(self) -> None:
        """Close the sandbox; no process, file or socket remains."""
        ...

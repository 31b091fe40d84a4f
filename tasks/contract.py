"""What a task's code may return or raise. All of it is duck-typed: a task needs no import of Asterism.

An object with the same attributes, or a dict with the same keys, does the same. docs/tasks.md has examples.
"""

from typing import Any, Protocol

import msgspec

SANDBOX = "sandbox"  # parameter of a constructor, a tool or a reward function that receives a SandboxHandle


class Fault(Exception):
    """The infrastructure failed, such as a server of the task. The call is retried once, and then the trajectory is
    masked and counted; it is never scored."""


class ToolResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a tool that needs more than text."""

    content: str | list[dict[str, Any]]
    stop: bool = False  # the trajectory ends
    rewards: dict[str, float] = {}  # components of the reward, summed over the calls
    metrics: dict[str, float] = {}  # reported, and not part of the reward
    fault: str | Exception | None = None  # as if Fault was raised


class Opening(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a dialogue's `init`: the messages of the user that follow the row's question."""

    messages: str | list[dict[str, Any]] = ""


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a dialogue's `step`: the user's answer to a turn of the assistant."""

    messages: str | list[dict[str, Any]] = ""
    done: bool = False  # the trajectory ends
    rewards: dict[str, float] = {}
    metrics: dict[str, float] = {}
    fault: str | Exception | None = None


class SandboxResult(msgspec.Struct, frozen=True):
    stdout: str
    stderr: str
    error: str  # traceback, or the limit that ended the program; empty if it succeeded

    @property
    def ok(self) -> bool:
        return not self.error


class SandboxHandle(Protocol):
    """The sandbox, for a model's program."""

    async def run(self, code: str, stdin: str = "", files: dict[str, str] | None = None) -> SandboxResult:
        """Runs a Python program in a process of its own, with text files in its folder. Raises Fault."""
        ...

    def run_blocking(self, code: str, stdin: str = "", files: dict[str, str] | None = None) -> SandboxResult:
        """The same for sync functions. Raises Fault."""
        ...

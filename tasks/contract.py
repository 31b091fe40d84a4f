"""The types that a task's code may return or raise.

A task need not import Asterism: an object with the same attributes, or a dict with the same keys, has the same effect.
docs/tasks.md has examples.
"""

from typing import Any, Protocol

import msgspec

SANDBOX = "sandbox"  # parameter of a constructor, a tool or a reward function that receives a SandboxHandle


class Fault(Exception):
    """The infrastructure failed, such as a server of the task. Asterism retries the call once. After a second failure,
    the trajectory is masked and counted, and never scored."""


class ToolResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a tool that returns more than text."""

    content: str | list[dict[str, Any]]
    stop: bool = False  # whether the trajectory ends
    rewards: dict[str, float] = {}  # components of the reward, summed over the calls
    metrics: dict[str, float] = {}  # metrics to report, which are not part of the reward
    fault: str | Exception | None = None  # has the same effect as raising Fault


class Opening(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a dialogue's `init`: messages of the user after the row's question."""

    messages: str | list[dict[str, Any]] = ""


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a dialogue's `step`: the user's answer to a turn of the assistant. See ToolResult."""

    messages: str | list[dict[str, Any]] = ""
    done: bool = False  # whether the trajectory ends
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
    """The sandbox, in which a task may run a model's program."""

    async def run(self, code: str, stdin: str = "", files: dict[str, str] | None = None) -> SandboxResult:
        """Run a Python program in a separate process, with text files in its folder. Raises Fault."""
        ...

    def run_blocking(self, code: str, stdin: str = "", files: dict[str, str] | None = None) -> SandboxResult:
        """Run a Python program like `run`, for sync functions. Raises Fault."""
        ...

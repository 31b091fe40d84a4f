"""Tool calls and gradings: between the rollout process and the executors, which come and go."""

from __future__ import annotations

from typing import Literal

import msgspec

from bus.messages.message import Message


class ExecutorJoined(Message, frozen=True):
    """executor -> launcher -> rollout: a sandbox stands. The launcher passes it on, so that it never overtakes, nor is
    overtaken by, the word that this executor left."""

    executor: str  # the address of this life of it: `executor-0/2` is the second; nothing for the first reaches it
    slots: int  # calls that it runs side by side


class ExecutorLeft(Message, frozen=True):
    """launcher -> rollout: this life is over. Its answers that are still under way count no more."""

    executor: str
    cause: str


class ExecutorProved(Message, frozen=True):
    """executor -> launcher, once in a life: its first result. The deaths before it are forgiven."""

    executor: str


class CallsMoved(Message, frozen=True):
    """rollout -> launcher, for its log alone: what became of calls and gradings as an executor joined or left."""

    executor: str
    sent: int  # to an executor, for the first time or again
    waiting: int  # trajectories that now wait for an executor
    lost: int  # trajectories that failed


class CodeRequested(Message, frozen=True):
    """rollout -> executor."""

    trajectory_id: int
    call: int  # counts the trajectory's calls from 0
    tool: Literal["jupyter_code", "python_code_with_standard_io"]
    code: str
    stdin: str


class SessionRestored(Message, frozen=True):
    """rollout -> executor, ahead of a trajectory's first call there: the notebook that it had at another executor.

    The cells run again when the next call needs what they did, unseen by the model.
    """

    trajectory_id: int
    cells: tuple[CodeRequested, ...]  # in their order: those whose effects the notebook holds


class Output(msgspec.Struct, frozen=True, array_like=True):
    """What a call wrote, as text whatever its bytes."""

    stdout: str = ""
    stderr: str = ""
    stdout_cut: int = 0  # bytes dropped beyond the limit
    stderr_cut: int = 0


class CodeOk(Message, frozen=True):
    output: Output


class CodeRaised(Message, frozen=True):
    """An exception left the code, or it did not compile; `traceback` is without the harness's own frames."""

    output: Output
    error: str  # "NameError: name 'x' is not defined"
    traceback: str


class CodeTimedOut(Message, frozen=True):
    output: Output
    limit_s: float


class CodeOutOfMemory(Message, frozen=True):
    output: Output
    limit_mib: int


class CodeDied(Message, frozen=True):
    """The process ended by itself before the code did: an exit code, or the negative number of a signal."""

    output: Output
    exit_code: int


class CodeRefused(Message, frozen=True):
    """The call never ran: an unknown tool, a code text over the limit."""

    reason: str


CodeOutcome = CodeOk | CodeRaised | CodeTimedOut | CodeOutOfMemory | CodeDied | CodeRefused


class CodeFinished(Message, frozen=True):
    """executor -> rollout."""

    trajectory_id: int
    call: int
    outcome: CodeOutcome
    duration_s: float  # from the start of execution; never shown to the model
    executor: str  # the life of it that ran the call, as in ExecutorJoined


class CallFailed(Message, frozen=True):
    """executor -> rollout: infrastructure broke. `call` is the call's number, or -1 for a grading."""

    trajectory_id: int
    call: int
    cause: str
    executor: str


class SessionEnded(Message, frozen=True):
    """rollout -> executor: the trajectory is over. Its session may go, and what of it is under way is stopped: no answer
    to it is sent any more, though one may have been."""

    trajectory_id: int


class AnswerSubmitted(Message, frozen=True):
    """rollout -> executor: grade the assistant's own final answer."""

    trajectory_id: int
    answer: str
    ground_truth: str


class AnswerGraded(Message, frozen=True):
    trajectory_id: int
    correct: bool
    duration_s: float
    executor: str


CallMessage = (
    ExecutorJoined
    | ExecutorLeft
    | ExecutorProved
    | CallsMoved
    | CodeRequested
    | SessionRestored
    | CodeFinished
    | CallFailed
    | SessionEnded
    | AnswerSubmitted
    | AnswerGraded
)

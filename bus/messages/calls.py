"""Tool calls and gradings: messages between the rollout process and the executors."""

from typing import Literal

import msgspec

from asterism.bus.messages.groups import Ending
from asterism.bus.messages.message import Message


class ExecutorJoined(Message, frozen=True):
    """executor -> launcher -> rollout, in order with ExecutorLeft: a sandbox is ready."""

    executor: str  # address of this incarnation; `executor-0/2` is the second incarnation
    slots: int  # number of concurrent calls


class ExecutorLeft(Message, frozen=True):
    """launcher -> rollout: this incarnation has ended; later answers from it are ignored."""

    executor: str
    cause: str


class ExecutorHealthy(Message, frozen=True):
    """executor -> launcher, after an incarnation's first result: the launcher resets its count of restarts."""

    executor: str


class CallsRescheduled(Message, frozen=True):
    """rollout -> launcher, only for its log, after an executor has joined or left."""

    executor: str
    sent: int  # calls and gradings sent to an executor, including retries
    waiting: int  # number of trajectories that now wait for an executor
    lost: int  # number of trajectories that failed


class CodeRequested(Message, frozen=True):
    """rollout -> executor: run a call of a code tool."""

    trajectory_id: int
    call: int  # counts the trajectory's calls from 0
    tool: Literal["jupyter_code", "python_code_with_standard_io"]
    code: str
    stdin: str


class SessionRestored(Message, frozen=True):
    """rollout -> executor, before the first call on this executor: the notebook that the trajectory had on another
    executor. The cells run again, invisible to the model, when the next call needs their effects."""

    trajectory_id: int
    cells: tuple[CodeRequested, ...]  # all cells with effects in the notebook, in order


class Output(msgspec.Struct, frozen=True, array_like=True):
    """The output of a call; invalid UTF-8 is escaped."""

    stdout: str = ""
    stderr: str = ""
    stdout_cut: int = 0  # dropped bytes beyond the limit
    stderr_cut: int = 0


class CodeOk(Message, frozen=True):
    output: Output


class CodeRaised(Message, frozen=True):
    """An uncaught exception or a syntax error; `traceback` excludes frames of the harness."""

    output: Output
    error: str  # such as "NameError: name 'x' is not defined"
    traceback: str


class CodeTimedOut(Message, frozen=True):
    output: Output
    limit_s: float


class CodeOutOfMemory(Message, frozen=True):
    output: Output
    limit_mib: int


class CodeCrashed(Message, frozen=True):
    """The process exited before the code ended; `exit_code` is negative for a signal."""

    output: Output
    exit_code: int


class CodeRefused(Message, frozen=True):
    """The call did not run: unknown tool, or code longer than the limit."""

    reason: str


CodeOutcome = CodeOk | CodeRaised | CodeTimedOut | CodeOutOfMemory | CodeCrashed | CodeRefused


class CodeFinished(Message, frozen=True):
    """executor -> rollout: the call of a code tool has ended."""

    trajectory_id: int
    call: int
    outcome: CodeOutcome
    duration_s: float  # time from the start of execution; never shown to the model
    executor: str  # incarnation that ran the call, as in ExecutorJoined


class CallFailed(Message, frozen=True):
    """executor -> rollout: the infrastructure failed during a call. `call` is -1 for a grading."""

    trajectory_id: int
    call: int
    cause: str
    executor: str


class SessionEnded(Message, frozen=True):
    """rollout -> executor: the trajectory has ended.
    The executor ends the trajectory's notebook and environment, and stops an unfinished call without an
    answer, although an answer can be in flight already."""

    trajectory_id: int


class RewardInput(msgspec.Struct, frozen=True, array_like=True):
    """The input of reward functions."""

    ending: Ending
    row: bytes  # see StartGroup
    prompt_tokens: int
    token_ids: bytes  # int32 ids of prompt and response
    loss_mask: bytes  # uint8; 1 for generated tokens


class AnswerSubmitted(Message, frozen=True):
    """rollout -> executor: grade the final answer. Reward functions also grade a trajectory without an answer."""

    trajectory_id: int
    answer: str
    ground_truth: str
    reward_input: RewardInput | None = None  # None without reward functions
    task: str = ""  # see StartGroup
    rewards: dict[str, float] = msgspec.field(default_factory=dict)  # component sums over the environment's calls
    metrics: dict[str, float] = msgspec.field(default_factory=dict)


class AnswerGraded(Message, frozen=True):
    """executor -> rollout: the answer is graded."""

    trajectory_id: int
    reward: float  # weighted sum of the components
    duration_s: float
    executor: str
    components: dict[str, float] = msgspec.field(default_factory=dict)  # unweighted, by name; unscored ones are absent


ExecutorEvent = ExecutorJoined | ExecutorLeft | ExecutorHealthy | CallsRescheduled
SandboxRequest = CodeRequested | SessionRestored | SessionEnded | AnswerSubmitted
CallMessage = ExecutorEvent | SandboxRequest | CodeFinished | AnswerGraded | CallFailed

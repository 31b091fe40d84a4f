"""The whole protocol on one page: every message that crosses a process border.

Reading order: one trajectory's way is StartGroup, LeaseRequested, LeaseGranted, TurnRequested, TurnGenerated,
CodeRequested, CodeFinished, ... AnswerSubmitted, AnswerGraded, TrajectoryFinished; a step's way is StepRequested,
BatchReady, StepTrained, WeightsPublished, WeightsLoaded.

Token ids travel as raw bytes: little-endian int32; logprobs float32; policy versions int32; masks uint8.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all messages; the class name is the tag on the wire and in the log."""


# ---------------------------------------------------------------- joining and leaving


class EngineJoined(Message, frozen=True):
    """A generator offers its KV cache. Leases on it are rounded up to whole pages."""

    engine: str
    kv_tokens: int
    page_tokens: int
    version: int  # policy version of the weights that it holds
    life: int = 1  # counts the engine's starts; deciders refuse what is of an earlier life, or of one that is over


class EngineLeft(Message, frozen=True):
    """launcher -> arbiter and rollouts: this life is over, and so are those before it."""

    engine: str
    cause: str
    life: int = 1


class EngineLoadReported(Message, frozen=True):
    """generator -> arbiter, several times a second while it works: what the engine measures. Counters since its start."""

    engine: str
    version: int
    running: int  # sequences that decode
    waiting: int  # requests that the engine could not begin yet: 0 unless it has less room than it said
    used_tokens: int  # KV tokens in pages that are not free
    cached_tokens: int  # of them in pages that no running sequence holds
    decode_steps: int
    generated_tokens: int
    prefilled_tokens: int
    recomputed_tokens: int  # of them those that had been computed before: after eviction, preemption or migration
    evicted_tokens: int  # cached tokens that the engine gave up by itself, for lack of room
    preempted: int  # running sequences that it stopped for lack of room
    busy_s: float
    life: int = 1  # as in EngineJoined


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


class BufferCursor(msgspec.Struct, frozen=True, array_like=True):
    """Where the group buffer stands between two steps."""

    position: int = 0  # in the endless sequence of problems
    next_group_id: int = 0
    next_trajectory_id: int = 0
    pending: tuple[int, ...] = ()  # earlier positions whose groups are under way for a later step: started anew first


class RunStarted(Message, frozen=True):
    """A process's word to its own deciders, the first event of each life of a run: begin anew after `step`.

    `cursor` is the buffer's at the end of that step, found in the log.
    """

    step: int
    cursor: BufferCursor


class RunFinished(Message, frozen=True):
    steps: int


# ---------------------------------------------------------------- the step, seen from above


class StepRequested(Message, frozen=True):
    """recipe -> buffer: collect the groups of one training step."""

    step: int
    version: int


class EvaluationRequested(Message, frozen=True):
    """recipe -> buffer: one trajectory for each of the first `questions` test questions."""

    label: str  # "start_sampled", "start_greedy", "end_sampled", "end_greedy"
    temperature: float
    questions: int
    version: int


class EvaluationFinished(Message, frozen=True):
    """buffer -> recipe, recorder. Accuracy is correct / (questions - failed)."""

    label: str
    questions: int
    correct: int
    failed: int  # trajectories that infrastructure lost; they are no answers
    response_tokens: int  # summed


class Row(msgspec.Struct, frozen=True, array_like=True):
    """One trajectory as the learner sees it. T tokens, prompt included."""

    trajectory_id: int
    group_id: int
    advantage: float
    prompt_tokens: int
    token_ids: bytes  # int32 [T]
    loss_mask: bytes  # uint8 [T]; 1 where the model generated the token, and it is not too old to be trained on
    logprobs: bytes  # float32 [T]; under the version that generated the token, 0 where it was not generated
    versions: bytes  # int32 [T]; -1 where not generated


class StepCounts(msgspec.Struct, frozen=True):
    """What one step's groups were. Sums over all groups that the step started or was left, the rejected ones included,
    up to its end: what is aborted then is in LengthsMeasured."""

    groups: int = 0
    groups_rejected: int = 0  # equal rewards: no gradient
    groups_lost: int = 0  # too few trajectories left after infrastructure failures, or young enough
    trajectories: int = 0  # finished
    trajectories_failed: int = 0  # lost to infrastructure
    correct: int = 0
    overlong: int = 0  # hit the length limit
    calls: int = 0
    calls_failed: int = 0
    positive_calls: int = 0  # of correct trajectories
    positive_calls_failed: int = 0
    generated_tokens: int = 0
    response_tokens: int = 0  # generated and tool tokens
    lease_wait_s: float = 0.0  # summed over trajectories
    generation_s: float = 0.0
    tools_s: float = 0.0
    grading_s: float = 0.0


class StalenessCounts(msgspec.Struct, frozen=True):
    """How many versions what a step trains on is behind the policy that it updates."""

    tokens: int = 0  # trained on
    versions_behind: int = 0  # summed over them
    most_behind: int = 0
    tokens_masked: int = 0  # too old, in trajectories that are trained on
    trajectories_dropped: int = 0  # too old, as a whole


class BatchReady(Message, frozen=True):
    """buffer -> learner: the kept trajectories of a step."""

    step: int
    rows: tuple[Row, ...]


class StepCollected(Message, frozen=True):
    """buffer -> recipe, recorder: the step has its groups; the learner has the batch."""

    step: int
    rows: int
    counts: StepCounts
    failures: dict[str, int]  # infrastructure failures by cause
    cursor: BufferCursor
    staleness: StalenessCounts | None = None  # of a run whose rollouts may run ahead of the learner


class LengthCounts(msgspec.Struct, frozen=True):
    trajectories: int = 0
    response_tokens: int = 0  # summed; of an aborted one those that it had
    overlong: int = 0  # hit the length limit


class LengthsMeasured(Message, frozen=True):
    """buffer -> recorder: all trajectories of the groups that were started for a step have ended, now or later than it."""

    step: int
    taken: LengthCounts  # of the groups that were complete when the step ended
    started: LengthCounts  # of all groups
    aborted: int  # trajectories that were stopped because their step had ended
    late: int  # that were to be stopped, and had ended by themselves


class StepTrained(Message, frozen=True):
    """learner -> recipe, recorder. `step` 0 is the end of the cold start."""

    step: int
    metrics: dict[str, float]


class WeightsPublished(Message, frozen=True):
    """learner -> recipe -> generators. The weights lie in shared memory; only their address travels."""

    version: int
    path: str
    num_bytes: int
    digest: str  # blake2b-128 of the bytes


class WeightsLoaded(Message, frozen=True):
    engine: str
    version: int
    load_s: float


class MetricsRecorded(Message, frozen=True):
    """recorder -> the head's metrics file: one line of it."""

    kind: Literal["step", "evaluation", "lengths"]
    step: int
    label: str  # of an evaluation, else empty
    values: dict[str, float]


class Progress(Message, frozen=True):
    """anyone -> launcher, for the display alone: nothing is decided by it."""

    stage: str
    step: int
    steps: int
    values: dict[str, float]


# ---------------------------------------------------------------- one trajectory


class StartGroup(Message, frozen=True):
    """buffer -> rollout: start `size` trajectories, numbered from `first_trajectory_id`, on one prompt."""

    group_id: int
    purpose: Literal["train", "evaluate"]
    problem: str  # the question's name in its data file
    ground_truth: str
    prompt_ids: bytes
    size: int
    first_trajectory_id: int
    temperature: float
    seed: int


class GroupAborted(Message, frozen=True):
    """buffer -> rollout: the group's step has ended without it. Those of its trajectories that live are stopped."""

    group_id: int
    first_trajectory_id: int
    size: int
    cause: str


class LeaseRequested(Message, frozen=True):
    """rollout -> arbiter: room for the trajectory's next tokens. It is asked for before each turn, and again within a turn
    that its lease has ended."""

    trajectory_id: int
    group_id: int
    turn: int
    lease: int  # the one that it asks for: counts the trajectory's leases from 1
    tokens: int  # so far, prompt included
    prompt_tokens: int  # that the group's trajectories share
    max_new_tokens: int  # the trajectory may get so much longer, tool results included


class LeaseGranted(Message, frozen=True):
    """arbiter -> rollout: the trajectory may have so many tokens in that engine's cache, those so far included."""

    trajectory_id: int
    engine: str
    tokens: int
    lease: int  # counts the trajectory's leases from 1
    waited_s: float
    reason: str
    life: int = 1  # of the engine; with it the lease ends


class LeaseDeferred(Message, frozen=True):
    """arbiter -> rollout, for its log alone: the request waits."""

    trajectory_id: int
    reason: str


class LeaseParked(Message, frozen=True):
    """rollout -> arbiter: the turn has its tokens, and a tool works. The lease shrinks to what is cached, which the arbiter
    may give up until the next request."""

    trajectory_id: int
    tokens: int


class LeaseReleased(Message, frozen=True):
    """rollout -> the engine, which forgets the trajectory's cache, and -> arbiter: the trajectory needs none any more."""

    trajectory_id: int
    tokens: int  # at its end


class LedgerReported(Message, frozen=True):
    """arbiter -> launcher, for its log alone, with each report of an engine: the arbiter's books beside the measurement."""

    engine: str
    leased_tokens: int
    usable_tokens: int  # of its capacity, as far as it is trusted: an engine that evicts or preempts has less
    running: int  # trajectories
    parked: int
    waiting: int  # with a cache there
    used_tokens: int  # as the engine measured


class CacheReleased(Message, frozen=True):
    """arbiter -> generator: forget the trajectory's cache, unless a request under a later lease has come meanwhile."""

    trajectory_id: int
    lease: int


class AdmissionContinued(Message, frozen=True):
    """arbiter -> arbiter: more requests may be granted than one decision should grant."""


class TurnRequested(Message, frozen=True):
    """rollout -> generator. The ids of the whole trajectory so far; the engine knows which it has cached."""

    trajectory_id: int
    turn: int
    lease: int
    token_ids: bytes
    max_new_tokens: int  # as far as the lease goes
    temperature: float
    top_p: float
    top_k: int
    stop_token_ids: tuple[int, ...]
    seed: int  # of the trajectory; a token's draw depends on it and on the token's position alone
    life: int = 1  # of the engine, as the lease has it; another one answers TurnFailed


class TurnGenerated(Message, frozen=True):
    """generator -> rollout. N new tokens, the stop token among them."""

    trajectory_id: int
    turn: int
    lease: int  # under which it was requested
    token_ids: bytes  # int32 [N]
    logprobs: bytes  # float32 [N]
    versions: bytes  # int32 [N]
    finish: Literal["stop", "length", "abort"]


class TurnFailed(Message, frozen=True):
    trajectory_id: int
    turn: int
    lease: int
    cause: str


class TurnAborted(Message, frozen=True):
    """rollout -> generator: stop this turn; it answers with what it has and finish "abort"."""

    trajectory_id: int
    lease: int  # under which it was requested


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


class TrajectoryFinished(Message, frozen=True):
    """rollout -> buffer. T tokens, prompt included, as in Row."""

    trajectory_id: int
    group_id: int
    reward: float
    ending: Literal["answered", "no_answer", "length", "turns"]
    prompt_tokens: int
    token_ids: bytes
    loss_mask: bytes
    logprobs: bytes
    versions: bytes
    turns: int
    calls: int
    calls_failed: int
    responses_with_error: int  # tool responses whose text contains "error" in any case: the release's p_err
    answer_opens: int  # `<answer>` tags in the assistant's own text
    answer_closes: int
    lease_wait_s: float
    generation_s: float
    tools_s: float
    grading_s: float


class TrajectoryFailed(Message, frozen=True):
    """rollout -> buffer: lost to infrastructure, after a retry. Never a reward."""

    trajectory_id: int
    group_id: int
    cause: str


class TrajectoryAborted(Message, frozen=True):
    """rollout -> buffer: stopped by GroupAborted. Neither an answer nor a failure of infrastructure."""

    trajectory_id: int
    group_id: int
    cause: str
    response_tokens: int  # so far


# ---------------------------------------------------------------- control


class Batch(Message, frozen=True):
    """What one process has for another in one turn of its event loop. It is packed and unpacked by the bus alone."""

    envelopes: tuple[msgspec.Raw, ...]  # each an encoded Envelope


class GenerationPaused(Message, frozen=True):
    """anyone -> generator: hold all requests where they are."""


class GenerationContinued(Message, frozen=True):
    """anyone -> generator."""


class Shutdown(Message, frozen=True):
    """launcher -> every process: end in order, losing nothing that is logged."""


AnyMessage = (
    EngineJoined
    | EngineLeft
    | EngineLoadReported
    | ExecutorJoined
    | ExecutorLeft
    | ExecutorProved
    | CallsMoved
    | RunStarted
    | RunFinished
    | StepRequested
    | EvaluationRequested
    | EvaluationFinished
    | BatchReady
    | StepCollected
    | StepTrained
    | WeightsPublished
    | WeightsLoaded
    | LengthsMeasured
    | MetricsRecorded
    | Progress
    | StartGroup
    | GroupAborted
    | LeaseRequested
    | LeaseGranted
    | LeaseDeferred
    | LeaseParked
    | LeaseReleased
    | LedgerReported
    | CacheReleased
    | AdmissionContinued
    | TurnRequested
    | TurnGenerated
    | TurnFailed
    | TurnAborted
    | CodeRequested
    | SessionRestored
    | CodeFinished
    | CallFailed
    | SessionEnded
    | AnswerSubmitted
    | AnswerGraded
    | TrajectoryFinished
    | TrajectoryFailed
    | TrajectoryAborted
    | Batch
    | GenerationPaused
    | GenerationContinued
    | Shutdown
)


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """What travels. An actor's address is its process, or `process/actor` where a process holds several."""

    sender: str
    to: str
    message: AnyMessage


class ProtocolError(Exception):
    """An event that the protocol forbids in the present state. The state is as it was."""

"""One step, seen from above: between the recipe, the group buffer, the learner and the recorder."""

from __future__ import annotations

import msgspec

from bus.messages.message import Message
from bus.messages.run import BufferCursor


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
    """learner -> recipe, recorder. `step` 0 is the end of the cold start. It comes again from a learner that has begun
    again from a checkpoint."""

    step: int
    metrics: dict[str, float]


class WeightsPublished(Message, frozen=True):
    """learner -> recipe -> generators. The weights lie in shared memory; only their address travels."""

    version: int
    path: str
    num_bytes: int
    digest: str  # blake2b-128 of the bytes


class WeightsLoaded(Message, frozen=True):
    """generator -> recipe."""

    engine: str
    version: int
    load_s: float
    life: int = 1  # of the engine


class WeightsHeld(Message, frozen=True):
    """recipe -> recorder: every engine that is there holds this version or a newer one."""

    version: int


class MemoryWanted(Message, frozen=True):
    """learner -> recipe: before it computes, where it shares its GPUs with engines. Until it publishes weights it keeps
    their memory."""

    life: int  # of the learner
    version: int  # no older weights will it publish then; -1: it has just begun


class RestRequested(Message, frozen=True):
    """recipe -> generators: give the memory back, until weights of this version come or newer ones. As in MemoryWanted."""

    life: int
    version: int


class EngineRested(Message, frozen=True):
    """generator -> recipe: it is given back."""

    engine: str
    life: int  # of the engine
    asked: RestRequested


class MemoryLent(Message, frozen=True):
    """recipe -> learner: every engine that is there has given its memory back."""

    life: int
    version: int


StepMessage = (
    StepRequested
    | EvaluationRequested
    | EvaluationFinished
    | BatchReady
    | StepCollected
    | LengthsMeasured
    | StepTrained
    | WeightsPublished
    | WeightsLoaded
    | WeightsHeld
    | MemoryWanted
    | RestRequested
    | EngineRested
    | MemoryLent
)

"""Groups of trajectories on one prompt: between the group buffer and the rollout process."""

from typing import Literal

import msgspec

from asterism.bus.messages.environments import EnvironmentHistory
from asterism.bus.messages.message import Message
from asterism.bus.messages.tokens import TokenRecord
from asterism.configs.algorithm import Sampling

# Why a finished trajectory stopped; an infrastructure failure or an abort has a cause instead.
# done: the task ended it, by ToolResult.stop or the `done` of a dialogue.
Ending = Literal["answered", "no_answer", "length", "turns", "done"]


class StartGroup(Message, frozen=True):
    """buffer -> rollout: start `size` trajectories on one prompt, from `first_trajectory_id`."""

    group_id: int
    purpose: Literal["train", "evaluate"]
    problem: str  # name of the question in its data file
    ground_truth: str
    prompt_ids: bytes
    size: int
    first_trajectory_id: int
    sampling: Sampling
    seed: int
    row: bytes = b""  # the row of data as a JSON object, for environments and reward functions; empty without them
    task: str = ""  # its name; empty if the run has no [[tasks]]
    evaluation_set: str = ""  # its name; empty for training, and if the run has no [[evaluation.sets]]


class GroupAborted(Message, frozen=True):
    """buffer -> rollout: abort the group's unfinished trajectories, since its step has ended."""

    group_id: int
    first_trajectory_id: int
    size: int
    cause: str


class ReleaseCounts(msgspec.Struct, frozen=True, array_like=True):
    """What the release's penalties count in the text of a whole response, tool results included."""

    tool_responses: int  # complete `<tool_response>` blocks, the model's own included
    responses_with_error: int  # blocks that contain "error", case-insensitive
    answer_opens: int
    answer_closes: int
    answer_spans: int  # complete answer blocks
    turns: int  # from an assistant's header to the end of its turn; the first header is in the prompt


class ToolCount(msgspec.Struct, frozen=True, array_like=True):
    """Answered calls of one tool."""

    calls: int = 0
    timed_out: int = 0


class TrajectoryFinished(Message, frozen=True):
    """rollout -> buffer."""

    trajectory_id: int
    group_id: int
    reward: float
    ending: Ending
    record: TokenRecord
    turns: int
    calls: int
    calls_failed: int
    responses_with_error: int  # tool results that contain "error", case-insensitive
    answer_opens: int  # `<answer>` tags in the assistant's text
    answer_closes: int
    answer_spans: int  # complete answer blocks in the assistant's text
    lease_wait_s: float
    generation_s: float
    tools_s: float
    grading_s: float
    components: dict[str, float] = msgspec.field(default_factory=dict)  # of the reward, as in AnswerGraded
    environment: EnvironmentHistory = EnvironmentHistory()  # empty without instances
    release: ReleaseCounts | None = None  # only with roc.penalty = "release"
    tools: dict[str, ToolCount] = msgspec.field(default_factory=dict)  # by name


class TrajectoryFailed(Message, frozen=True):
    """rollout -> buffer: infrastructure failure, after a retry; the trajectory has no reward."""

    trajectory_id: int
    group_id: int
    cause: str


class TrajectoryAborted(Message, frozen=True):
    """rollout -> buffer: stopped by GroupAborted, without an answer or a failure."""

    trajectory_id: int
    group_id: int
    cause: str
    response_tokens: int  # so far


# lost: too few trajectories are left; rejected: by rl.group_filter, such as for equal rewards.
Verdict = Literal["accepted", "lost", "rejected"]


class GroupJudged(Message, frozen=True):
    """buffer -> recorder, only for its log: a complete group and its part of the batch."""

    step: int
    group_id: int
    seed: int  # of the group
    verdict: Verdict
    candidates: tuple[int, ...]  # trajectories within the staleness bound
    rewards: tuple[float, ...]  # of the candidates
    kept: tuple[int, ...]  # trajectories in the batch; none unless the group is accepted
    advantages: tuple[float, ...]  # of the kept trajectories
    task: str = ""  # as in StartGroup


TrajectoryEnd = TrajectoryFinished | TrajectoryFailed | TrajectoryAborted
GroupMessage = StartGroup | GroupAborted | TrajectoryEnd | GroupJudged

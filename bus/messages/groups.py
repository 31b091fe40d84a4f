"""Groups of trajectories on one prompt: messages between the group buffer and the rollout process."""

from typing import Literal

import msgspec

from asterism.bus.messages.environments import EnvironmentHistory
from asterism.bus.messages.message import Message
from asterism.bus.messages.tokens import TokenRecord
from asterism.configs.schema.algorithm import Sampling

# Reasons for the end of a finished trajectory; a failed or aborted trajectory has a cause instead.
# done: the task ended the trajectory, by ToolResult.stop or the `done` of a dialogue.
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
    task: str = ""  # name of the task; empty if the run has no [[tasks]]
    evaluation_set: str = ""  # name of the set; empty for training, and if the run has no [[evaluation.sets]]


class GroupAborted(Message, frozen=True):
    """buffer -> rollout: abort the group's unfinished trajectories, because their step has ended."""

    group_id: int
    first_trajectory_id: int
    size: int
    cause: str


class ReleaseCounts(msgspec.Struct, frozen=True, array_like=True):
    """Counts in the text of a response, including tool results, for the penalties of the release."""

    tool_responses: int  # number of complete `<tool_response>` blocks, including the model's own
    responses_with_error: int  # blocks that contain "error", case-insensitive
    answer_opens: int
    answer_closes: int
    answer_spans: int  # number of complete answer blocks
    turns: int  # turns from an assistant's header to its end; the first header is in the prompt


class ToolCount(msgspec.Struct, frozen=True, array_like=True):
    """Answered calls of one tool."""

    calls: int = 0
    timed_out: int = 0


class TrajectoryFinished(Message, frozen=True):
    """rollout -> buffer: a trajectory has ended, with a reward."""

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
    components: dict[str, float] = msgspec.field(default_factory=dict)  # components of the reward, see AnswerGraded
    environment: EnvironmentHistory = EnvironmentHistory()  # empty if no environment has an instance
    release: ReleaseCounts | None = None  # set only with roc.penalty = "release"
    tools: dict[str, ToolCount] = msgspec.field(default_factory=dict)  # calls by name of the tool


class TrajectoryFailed(Message, frozen=True):
    """rollout -> buffer: the infrastructure failed, also after a retry; the trajectory has no reward."""

    trajectory_id: int
    group_id: int
    cause: str


class TrajectoryAborted(Message, frozen=True):
    """rollout -> buffer: GroupAborted stopped the trajectory, without an answer or a failure."""

    trajectory_id: int
    group_id: int
    cause: str
    response_tokens: int  # response tokens at the abort


# lost: too few trajectories are left; rejected: rl.group_filter excludes the group, for example for equal rewards.
Verdict = Literal["accepted", "lost", "rejected"]


class GroupJudged(Message, frozen=True):
    """buffer -> recorder, only for its log: a complete group and the part of it in the batch."""

    step: int
    group_id: int
    seed: int  # seed of the group
    verdict: Verdict
    candidates: tuple[int, ...]  # trajectories within the staleness bound
    rewards: tuple[float, ...]  # rewards of the candidates
    kept: tuple[int, ...]  # trajectories in the batch; none unless the group is accepted
    advantages: tuple[float, ...]  # advantages of the kept trajectories
    task: str = ""  # see StartGroup


TrajectoryEnd = TrajectoryFinished | TrajectoryFailed | TrajectoryAborted
GroupMessage = StartGroup | GroupAborted | TrajectoryEnd | GroupJudged

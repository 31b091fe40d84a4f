"""Groups of trajectories on one prompt: between the group buffer and the rollout process."""

from __future__ import annotations

from typing import Literal

from bus.messages.message import Message


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


GroupMessage = StartGroup | GroupAborted | TrajectoryFinished | TrajectoryFailed | TrajectoryAborted

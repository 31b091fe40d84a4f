"""Generation of turns: messages between the rollout process and the generators."""

from typing import Literal

from asterism.bus.messages.message import Message
from asterism.configs.schema.algorithm import Sampling


class TurnRequested(Message, frozen=True):
    """rollout -> generator: generate a turn. Contains all token ids, although the engine can have cached a prefix."""

    trajectory_id: int
    turn: int
    lease: int
    token_ids: bytes
    max_new_tokens: int  # limit of new tokens, bounded by the lease
    sampling: Sampling
    stop_token_ids: tuple[int, ...]
    seed: int  # seed of the trajectory; the sampling noise depends only on the seed and the token's position
    incarnation: int = 1  # incarnation of the engine in the lease; another incarnation answers TurnFailed


class TurnGenerated(Message, frozen=True):
    """generator -> rollout: N new tokens, including the stop token."""

    trajectory_id: int
    turn: int
    lease: int  # lease of the request
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
    """rollout -> generator: answer with the tokens generated so far and finish "abort"."""

    trajectory_id: int
    lease: int  # lease of the request


TurnMessage = TurnRequested | TurnGenerated | TurnFailed | TurnAborted

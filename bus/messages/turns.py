"""A turn's tokens: between the rollout process and the generators."""

from __future__ import annotations

from typing import Literal

from bus.messages.message import Message


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


TurnMessage = TurnRequested | TurnGenerated | TurnFailed | TurnAborted

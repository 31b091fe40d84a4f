"""Compares two continuations of one trajectory: outcomes, and the first token that differs."""

from collections.abc import Sequence
from itertools import groupby
from typing import Literal

import msgspec
import numpy as np

from asterism.bus.messages import (
    TokenRecord,
    TrajectoryAborted,
    TrajectoryEnd,
    TrajectoryFailed,
    TrajectoryFinished,
    bytes_to_ids,
)
from asterism.policies.dialogue.chat_format import TextTokenizer
from asterism.policies.rollout.trajectory import Trajectory


class TokenDivergence(msgspec.Struct, frozen=True):
    """The first token that differs."""

    within: Literal["turn", "result"]  # the turn's generated text, or tool results before it
    turn: int
    token: int  # index in the turn's text or in the tool results
    position: int  # index in the sequence, prompt included


class TurnText(msgspec.Struct, frozen=True):
    turn: int
    given: str  # tool results since the turn before; empty for turn 0
    generated: str = msgspec.field(name="said")


class TrajectoryOutcome(msgspec.Struct, frozen=True):
    """The end of a trajectory, with its texts and tokens."""

    seed: int  # seed of the trajectory's group
    reward: float | None  # None: not graded
    ending: str
    turns: int
    calls: int
    calls_failed: int
    response_tokens: int
    turn_texts: tuple[TurnText, ...] = msgspec.field(name="told")
    token_ids: tuple[int, ...]  # prompt included
    loss_mask: tuple[int, ...]  # prompt included
    infrastructure_failed: bool = False


class TrajectoryComparison(msgspec.Struct, frozen=True):
    """A branch compared with the original trajectory; both have the same beginning."""

    same: bool  # all tokens are equal
    common_tokens: int  # leading tokens that are equal, prompt included
    # None: one sequence is a prefix of the other.
    divergence: TokenDivergence | None = msgspec.field(name="parting")
    # Maximum over the common tokens that were generated from the fork on; None without such tokens.
    logprob_difference_max: float | None


def find_turn_spans(loss_mask: bytes) -> list[tuple[int, int]]:
    """Return start and end of each turn with generated tokens; tool results separate the turns."""
    spans: list[tuple[int, int]] = []
    start = 0
    for generated, flags in groupby(loss_mask):
        end = start + len(list(flags))
        if generated:
            spans.append((start, end))
        start = end
    return spans


def build_outcome(tokenizer: TextTokenizer, trajectory: Trajectory, end: TrajectoryEnd | None) -> TrajectoryOutcome:
    record = trajectory.record
    return TrajectoryOutcome(
        seed=trajectory.group.seed,
        reward=end.reward if isinstance(end, TrajectoryFinished) else None,
        ending=_describe_ending(trajectory, end),
        turns=trajectory.turn,
        calls=trajectory.calls,
        calls_failed=trajectory.calls_failed,
        response_tokens=record.response_tokens,
        turn_texts=tuple(_decode_turns(tokenizer, record)),
        token_ids=tuple(bytes_to_ids(record.token_ids)),
        loss_mask=tuple(record.loss_mask),
        infrastructure_failed=isinstance(end, TrajectoryFailed),
    )


def _describe_ending(trajectory: Trajectory, end: TrajectoryEnd | None) -> str:
    match end:
        case TrajectoryFinished(ending=ending):
            return ending
        case TrajectoryFailed(cause=cause):
            return f"failed: {cause}"
        case TrajectoryAborted(cause=cause):
            return f"aborted: {cause}"
        case None:
            return f"not in the log: {trajectory.phase}"


def _decode_turns(tokenizer: TextTokenizer, record: TokenRecord) -> Sequence[TurnText]:
    ids, before = bytes_to_ids(record.token_ids), record.prompt_tokens
    turns: list[TurnText] = []
    for number, (start, end) in enumerate(find_turn_spans(record.loss_mask)):
        turns.append(TurnText(number, tokenizer.decode(ids[before:start]), tokenizer.decode(ids[start:end])))
        before = end
    return turns


def compare(original: TokenRecord, branch: TokenRecord, position: int) -> TrajectoryComparison:
    """Compare a branch with the original. `position` is the fork; the tokens before it are equal by construction."""
    ours, theirs = (np.frombuffer(record.token_ids, np.int32) for record in (branch, original))
    shorter = min(len(ours), len(theirs))
    differing = np.flatnonzero(ours[:shorter] != theirs[:shorter])
    common = int(differing[0]) if len(differing) else shorter
    return TrajectoryComparison(
        same=original.token_ids == branch.token_ids,
        common_tokens=common,
        divergence=_locate_divergence(branch, common) if len(differing) else None,
        logprob_difference_max=_compute_logprob_difference(original, branch, position, common),
    )


def _locate_divergence(branch: TokenRecord, position: int) -> TokenDivergence:
    given_start = branch.prompt_tokens
    turn = 0
    for turn, (start, end) in enumerate(find_turn_spans(branch.loss_mask)):
        if position < start:
            return TokenDivergence("result", turn, position - given_start, position)
        if position < end:
            return TokenDivergence("turn", turn, position - start, position)
        given_start = end
    return TokenDivergence("result", turn + 1, position - given_start, position)


def _compute_logprob_difference(original: TokenRecord, branch: TokenRecord, start: int, end: int) -> float | None:
    generated = np.frombuffer(branch.loss_mask, np.uint8)[start:end].astype(np.bool_)
    ours, theirs = (np.frombuffer(record.logprobs, np.float32)[start:end][generated] for record in (branch, original))
    return float(np.abs(ours - theirs).max()) if len(ours) else None

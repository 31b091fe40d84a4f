"""Two courses of one trajectory side by side: what each came to, and from where on their tokens differ."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from bus.messages import TrajectoryAborted, TrajectoryFailed, TrajectoryFinished
from policies.dialogue import TextTokenizer
from policies.history import End
from policies.record import Record, bytes_to_ids
from policies.trajectory import Trajectory


class Parting(msgspec.Struct, frozen=True):
    """The first token that differs."""

    within: Literal["turn", "result"]  # what the model generated, or what it was given before that turn
    turn: int
    token: int  # counted from the beginning of the turn's text, or of what was given
    position: int  # counted from the beginning of the prompt


class Turn(msgspec.Struct, frozen=True):
    turn: int
    given: str  # since the turn before: results of its calls; of turn 0 nothing, since the prompt is the same for all
    said: str


class Outcome(msgspec.Struct, frozen=True):
    """What a trajectory came to."""

    seed: int  # of its group
    reward: float | None  # None: it got none
    ending: str
    turns: int
    calls: int
    calls_failed: int
    response_tokens: int
    told: tuple[Turn, ...]
    token_ids: tuple[int, ...]  # the prompt's included, as are those of the loss mask
    loss_mask: tuple[int, ...]
    infrastructure_failed: bool = False


class Comparison(msgspec.Struct, frozen=True):
    """A trajectory beside another that began in the same way."""

    same: bool  # token for token, to the end
    common_tokens: int  # from the prompt's first one on
    parting: Parting | None  # None: as far as both go, they are the same
    logprob_difference_max: float | None  # of common tokens that were generated since `position`; None: there are none


class Stretch(NamedTuple):
    """Tokens [start, end) that were generated in one turn."""

    start: int
    end: int


def stretches(loss_mask: bytes) -> list[Stretch]:
    """One for each turn that has tokens: what is given stands between them."""
    found: list[Stretch] = []
    start = 0
    for generated, flags in groupby(loss_mask):
        end = start + len(list(flags))
        if generated:
            found.append(Stretch(start, end))
        start = end
    return found


def outcome_of(tokenizer: TextTokenizer, trajectory: Trajectory, end: End | None) -> Outcome:
    record = trajectory.record
    return Outcome(
        seed=trajectory.group.seed,
        reward=end.reward if isinstance(end, TrajectoryFinished) else None,
        ending=_ending(trajectory, end),
        turns=trajectory.turn,
        calls=trajectory.calls,
        calls_failed=trajectory.calls_failed,
        response_tokens=record.response_tokens,
        told=tuple(_told(tokenizer, record)),
        token_ids=tuple(bytes_to_ids(record.token_ids)),
        loss_mask=tuple(record.loss_mask),
        infrastructure_failed=isinstance(end, TrajectoryFailed),
    )


def _ending(trajectory: Trajectory, end: End | None) -> str:
    match end:
        case TrajectoryFinished(ending=ending):
            return ending
        case TrajectoryFailed(cause=cause):
            return f"failed: {cause}"
        case TrajectoryAborted(cause=cause):
            return f"aborted: {cause}"
        case None:
            return f"none in the log: {trajectory.phase}"


def _told(tokenizer: TextTokenizer, record: Record) -> Sequence[Turn]:
    ids, before = bytes_to_ids(record.token_ids), record.prompt_tokens
    turns: list[Turn] = []
    for number, (start, end) in enumerate(stretches(record.loss_mask)):
        turns.append(Turn(number, tokenizer.decode(ids[before:start]), tokenizer.decode(ids[start:end])))
        before = end
    return turns


def compare(original: Record, branch: Record, position: int) -> Comparison:
    """`position`: the two are the same before it by their making."""
    ours, theirs = (np.frombuffer(record.token_ids, np.int32) for record in (branch, original))
    both = min(len(ours), len(theirs))
    differing = np.flatnonzero(ours[:both] != theirs[:both])
    common = int(differing[0]) if len(differing) else both
    return Comparison(
        same=original.token_ids == branch.token_ids,
        common_tokens=common,
        parting=_parting(branch, common) if len(differing) else None,
        logprob_difference_max=_logprob_difference(original, branch, position, common),
    )


def _parting(branch: Record, position: int) -> Parting:
    given_from = branch.prompt_tokens
    turn = 0
    for turn, (start, end) in enumerate(stretches(branch.loss_mask)):
        if position < start:
            return Parting("result", turn, position - given_from, position)
        if position < end:
            return Parting("turn", turn, position - start, position)
        given_from = end
    return Parting("result", turn + 1, position - given_from, position)


def _logprob_difference(original: Record, branch: Record, start: int, end: int) -> float | None:
    generated = np.frombuffer(branch.loss_mask, np.uint8)[start:end].astype(np.bool_)
    ours, theirs = (np.frombuffer(record.logprobs, np.float32)[start:end][generated] for record in (branch, original))
    return float(np.abs(ours - theirs).max()) if len(ours) else None

"""The two lanes of a link. What is in the control lane never waits for what is in the bulk lane; each keeps its order."""

from __future__ import annotations

from typing import Literal

from bus.codec import begins_with, head_of
from bus.messages import (
    AnswerGraded,
    AnswerSubmitted,
    BatchReady,
    CallFailed,
    CodeFinished,
    CodeRequested,
    SessionEnded,
    SessionRestored,
    TrajectoryAborted,
    TrajectoryFailed,
    TrajectoryFinished,
    TurnAborted,
    TurnFailed,
    TurnGenerated,
    TurnRequested,
)

Lane = Literal["control", "bulk"]
CONTROL: Lane = "control"
BULK: Lane = "bulk"
LANES: tuple[Lane, ...] = (CONTROL, BULK)

# What carries tokens or texts, and whatever must keep its order with these.
_BULK_KINDS = (
    *(TurnRequested, TurnAborted, TurnGenerated, TurnFailed),
    *(TrajectoryFinished, TrajectoryFailed, TrajectoryAborted, BatchReady),
    *(CodeRequested, SessionRestored, CodeFinished, CallFailed, SessionEnded, AnswerSubmitted, AnswerGraded),
)
_BULK_NAMES = frozenset(kind.__name__ for kind in _BULK_KINDS)
_BULK_HEADS = tuple(head_of(kind) for kind in _BULK_KINDS)


def lane_of(kind: str) -> Lane:
    """Of a message's kind, which is the name of its class."""
    return BULK if kind in _BULK_NAMES else CONTROL


def lane_of_frame(frame: bytes) -> Lane:
    """Of an encoded Envelope; what is none is control."""
    return BULK if begins_with(frame, _BULK_HEADS) else CONTROL

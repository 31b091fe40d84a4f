"""The two lanes of a link. Control frames never wait for bulk frames; each lane keeps the order of its frames."""

from typing import Literal

from asterism.bus.codec import build_kind_prefix, has_kind_prefix
from asterism.bus.messages import (
    AnswerGraded,
    AnswerSubmitted,
    BatchReady,
    CallFailed,
    CodeFinished,
    CodeRequested,
    EnvironmentCalled,
    EnvironmentRestored,
    EnvironmentReturned,
    GroupAccepted,
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

# Messages with tokens or texts, and messages that must stay in order with those messages.
_BULK_KINDS = (
    *(TurnRequested, TurnAborted, TurnGenerated, TurnFailed),
    *(TrajectoryFinished, TrajectoryFailed, TrajectoryAborted, GroupAccepted, BatchReady),
    *(CodeRequested, SessionRestored, CodeFinished, CallFailed, SessionEnded, AnswerSubmitted, AnswerGraded),
    *(EnvironmentCalled, EnvironmentRestored, EnvironmentReturned),
)
_BULK_NAMES = frozenset(kind.__name__ for kind in _BULK_KINDS)
_BULK_PREFIXES = tuple(build_kind_prefix(kind) for kind in _BULK_KINDS)


def select_lane(kind: str) -> Lane:
    """Return the lane of a message, by the name of its class."""
    return BULK if kind in _BULK_NAMES else CONTROL


def select_frame_lane(frame: bytes) -> Lane:
    """Return the lane of an encoded Envelope; control for malformed frames."""
    return BULK if has_kind_prefix(frame, _BULK_PREFIXES) else CONTROL

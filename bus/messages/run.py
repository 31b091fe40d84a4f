"""A run's life: the launcher's word to all processes, and what they have to show."""

from __future__ import annotations

from typing import Literal

import msgspec

from bus.messages.message import Message


class BufferCursor(msgspec.Struct, frozen=True, array_like=True):
    """Where the group buffer stands between two steps."""

    position: int = 0  # in the endless sequence of problems
    next_group_id: int = 0
    next_trajectory_id: int = 0
    pending: tuple[int, ...] = ()  # earlier positions whose groups are under way for a later step: started anew first


class RunStarted(Message, frozen=True):
    """A process's word to its own deciders, the first event of each life of a run: begin anew after `step`.

    `cursor` is the buffer's at the end of that step, found in the log.
    """

    step: int
    cursor: BufferCursor


class RunFinished(Message, frozen=True):
    """recipe -> buffer -> launcher, once no trajectory is under way any more."""

    steps: int


class MetricsRecorded(Message, frozen=True):
    """recorder -> the head's metrics file: one line of it."""

    kind: Literal["step", "evaluation", "lengths"]
    step: int
    label: str  # of an evaluation, else empty
    values: dict[str, float]


class Progress(Message, frozen=True):
    """anyone -> launcher, for the display alone: nothing is decided by it."""

    stage: str
    step: int
    steps: int
    values: dict[str, float]


class Shutdown(Message, frozen=True):
    """launcher -> every process: end in order, losing nothing that is logged."""


RunMessage = RunStarted | RunFinished | MetricsRecorded | Progress | Shutdown

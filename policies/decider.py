"""The seam between decisions and the world: a decider takes an event and answers with effects.

A decider keeps its state to itself, so that one with 16K trajectories need not copy them for each event; it is
nevertheless a function of its log: the same events, with the same times, give the same effects and the same state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from bus.messages import AnyMessage


class Send(msgspec.Struct, frozen=True):
    """The one kind of effect: a message to an address."""

    to: str
    message: AnyMessage


class Decider(Protocol):
    def decide(self, now: float, event: AnyMessage) -> Sequence[Send]:
        """Take one event, at `now` seconds. Raises ProtocolError for a forbidden one, and has changed nothing then."""
        ...

    def state_after(self, event: AnyMessage) -> msgspec.Struct | None:
        """What to fingerprint once `event` is decided; None where it is not worth its cost."""
        ...

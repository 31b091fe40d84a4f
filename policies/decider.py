"""The interface of deciders: pure state machines that map an event to effects.

State is private and updated in place, because copying 16K trajectories for each event is too slow.
A decider is still a function of its log: the same events at the same times give the same effects
and the same state.
"""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from asterism.bus.messages import AnyMessage


class Send(msgspec.Struct, frozen=True):
    """The only kind of effect: a message to an address."""

    to: str
    message: AnyMessage


class Decider(Protocol):
    def decide(self, now: float, event: AnyMessage) -> Sequence[Send]:
        """Handle one event at `now` seconds. Raises ProtocolError and then changes nothing."""
        ...

    def get_state_after(self, event: AnyMessage) -> msgspec.Struct | None:
        """Return the state to fingerprint after `event`, or None to fingerprint nothing."""
        ...

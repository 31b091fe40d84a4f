"""What travels: the envelope, and everything that may lie in it."""

from __future__ import annotations

import msgspec

from bus.messages.calls import CallMessage
from bus.messages.cluster import ClusterMessage
from bus.messages.groups import GroupMessage
from bus.messages.leases import LeaseMessage
from bus.messages.run import RunMessage
from bus.messages.steps import StepMessage
from bus.messages.turns import TurnMessage

AnyMessage = RunMessage | StepMessage | GroupMessage | LeaseMessage | TurnMessage | CallMessage | ClusterMessage


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """What travels. An actor's address is its process, or `process/actor` where a process holds several."""

    sender: str
    to: str
    message: AnyMessage


class ProtocolError(Exception):
    """An event that the protocol forbids in the present state. The state is as it was."""

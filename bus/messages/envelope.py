"""The envelope of a message, and the union of all messages."""

import msgspec

from bus.messages.calls import CallMessage
from bus.messages.cluster import ClusterMessage
from bus.messages.environments import EnvironmentMessage
from bus.messages.groups import GroupMessage
from bus.messages.leases import LeaseMessage
from bus.messages.run import RunMessage
from bus.messages.steps import StepMessage
from bus.messages.turns import TurnMessage

AnyMessage = (
    RunMessage
    | StepMessage
    | GroupMessage
    | LeaseMessage
    | TurnMessage
    | CallMessage
    | EnvironmentMessage
    | ClusterMessage
)


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """A message with the addresses (bus.addresses) of its sender and its receiver."""

    sender: str
    to: str
    message: AnyMessage


class ProtocolError(Exception):
    """An event that the protocol forbids in the current state, which stays unchanged."""

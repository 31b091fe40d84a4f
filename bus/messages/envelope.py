"""The envelope of a message, and the union of all messages."""

import msgspec

from asterism.bus.messages.calls import CallMessage
from asterism.bus.messages.cluster import ClusterMessage
from asterism.bus.messages.environments import EnvironmentMessage
from asterism.bus.messages.groups import GroupMessage
from asterism.bus.messages.leases import LeaseMessage
from asterism.bus.messages.run import RunMessage
from asterism.bus.messages.steps import StepMessage
from asterism.bus.messages.turns import TurnMessage

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
    """A message with the addresses (asterism.bus.addresses) of its sender and its receiver."""

    sender: str
    to: str
    message: AnyMessage


class ProtocolError(Exception):
    """The error for an event that the protocol forbids in the current state; the state stays unchanged."""

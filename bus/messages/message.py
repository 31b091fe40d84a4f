"""The base class of messages."""

import msgspec


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A message. The class name is the tag on the wire and in the event log."""

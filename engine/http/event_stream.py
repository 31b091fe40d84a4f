"""Reads server-sent events from the bytes of a stream, by the WHATWG specification.

https://html.spec.whatwg.org/multipage/server-sent-events.html, section 9.2.6. Fields that only a
reconnection needs (`id`, `retry`) are ignored. No package fits: httpx-sse and the OpenAI SDK read the
responses of httpx, aiohttp-sse-client opens and reopens its own connections and ends lines at LF
alone, and none of them limits the size of an event.
"""

from collections.abc import Iterator
from typing import NamedTuple

MAX_EVENT_BYTES = 1 << 28  # a cumulative response of 1M tokens with their log probabilities has 60 MB
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class EventTooLong(ValueError):
    """The stream has an event, or a line, over the limit."""


class ServerSentEvent(NamedTuple):
    """An event. `data`: the bytes of its `data` fields, joined by line feeds, for a JSON decoder."""

    kind: bytes  # value of the field `event`; empty without this field
    data: bytes


class EventReader:
    """Reads the events of one stream. The reader discards an event without an empty line behind it."""

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_bytes = max_event_bytes
        self._line = bytearray()  # the beginning of a line whose end has not arrived
        self._kind, self._data, self._data_bytes = b"", list[bytes](), 0
        self._is_first_line, self._follows_cr = True, False

    def add(self, piece: bytes) -> Iterator[ServerSentEvent]:
        """Yield the events that end in this piece. The caller must exhaust the generator. Raises EventTooLong."""
        if self._follows_cr and piece.startswith(b"\n"):
            piece, self._follows_cr = piece[1:], False
        if piece:
            self._follows_cr = piece.endswith(b"\r")
        for part in piece.splitlines(keepends=True):  # bytes are split at CR, LF and CRLF alone
            if self._data_bytes + len(self._line) + len(part) > self._max_bytes:
                raise EventTooLong(f"the server sent an event of more than {self._max_bytes:,} bytes")
            if not part.endswith((b"\n", b"\r")):
                self._line += part
                return
            line = part.rstrip(b"\r\n")
            if self._line:
                line = bytes(self._line + line)
                self._line.clear()
            if self._is_first_line:
                line, self._is_first_line = line.removeprefix(_BYTE_ORDER_MARK), False
            if line:
                self._add_field(line)
            elif (event := self._end_event()) is not None:
                yield event

    def _add_field(self, line: bytes) -> None:
        """Add a field to the event; a comment is a field with an empty name."""
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            self._data.append(value)
            self._data_bytes += len(value) + 1
        elif name == b"event":
            self._kind = value

    def _end_event(self) -> ServerSentEvent | None:
        """Return the event, or None for an event without data, which the specification does not dispatch."""
        event = ServerSentEvent(self._kind, b"\n".join(self._data)) if self._data else None
        self._kind, self._data, self._data_bytes = b"", [], 0
        return event

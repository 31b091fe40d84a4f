"""Tests of server-sent events: the rules of the specification, splits at any position, and the limit of an event."""

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asterism.engine.http.event_stream import EventReader, EventTooLong, ServerSentEvent


def read(*pieces: bytes, max_bytes: int = 1 << 20) -> list[ServerSentEvent]:
    reader = EventReader(max_bytes)
    return [event for piece in pieces for event in reader.add(piece)]


def read_data(*pieces: bytes) -> list[bytes]:
    return [event.data for event in read(*pieces)]


@pytest.mark.parametrize(
    ("stream", "data"),
    [
        *((b"data: a\n\n", [b"a"]), (b"data:a\n\n", [b"a"]), (b"data:  a\n\n", [b" a"])),
        *((b"data: a\r\n\r\n", [b"a"]), (b"data: a\r\r", [b"a"]), (b"data: a\n\r\n", [b"a"])),
        (b"data: a\r\ndata: b\rdata: c\n\n", [b"a\nb\nc"]),
        (b"data: a\n\r\ndata: b\r\n\n", [b"a", b"b"]),
        (b"\n\n\r\r\n\ndata: a\n\n\n\n", [b"a"]),
        (b"\xef\xbb\xbfdata: a\n\n", [b"a"]),
        (b"\xef\xbb\xbf\xef\xbb\xbfdata: a\n\ndata: b\n\n", [b"b"]),  # only one byte order mark is removed
        (b"data: a\n\n\xef\xbb\xbfdata: b\n\n", [b"a"]),  # a byte order mark is removed only at the start
        (b": comment\ndata: a\n\n", [b"a"]),
        (b":\ndata: a\n:\n\n", [b"a"]),
        (b"data: a\n: comment\ndata: b\n\n", [b"a\nb"]),
        (b": data: a\n\n", []),
        (b"event: message\nid: 1\nretry: 10\ndata: a\n\n", [b"a"]),
        (b"data: a\nevent: message\nid: 1\nretry: x\n\n", [b"a"]),
        *((b"id: 1\n\nevent: x\n\nretry: 1\n\n", []), (b"data\n\n", [b""]), (b"data\ndata\n\n", [b"\n"])),
        *((b"data:\n\n", [b""]), (b"data: a:b\n\n", [b"a:b"]), (b"Data: a\n data: b\ndatas: c\n\n", [])),
        *((b"unknown\nother: x\ndata: a\n\n", [b"a"]), (b"data: a\n", []), (b"data: a", [])),
        (b"data: a\n\ndata: b\n", [b"a"]),
        (b"data: \x0b\x0c\x1c\x1d\x1e\xc2\x85\xe2\x80\xa8\n\n", [b"\x0b\x0c\x1c\x1d\x1e\xc2\x85\xe2\x80\xa8"]),
        (b"data: \xff\xfe\n\n", [b"\xff\xfe"]),  # data is not decoded
        (b"", []),
    ],
)
def test_a_stream_is_read_by_the_specification_for_any_split(stream: bytes, data: list[bytes]) -> None:
    assert read_data(stream) == data
    assert read_data(*(stream[place : place + 1] for place in range(len(stream)))) == data
    for place in range(len(stream)):
        assert read_data(stream[:place], b"", stream[place:]) == data


def test_a_kind_applies_only_to_its_own_event() -> None:
    assert read(b"event: error\nevent: last\ndata: a\n\ndata: b\n\nevent: x\n\ndata: c\n\n") == [
        (b"last", b"a"),
        (b"", b"b"),
        (b"", b"c"),
    ]


def read_by_definition(stream: bytes) -> list[bytes]:
    """Read a complete stream by applying the rules of the specification one after the other."""
    text = stream.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    *lines, _ = text.split(b"\n")
    buffer, found = b"", list[bytes]()
    for line in lines:
        if not line:
            if buffer:
                found.append(buffer[:-1])
            buffer = b""
        elif match := re.fullmatch(rb"data(?:: ?(.*))?", line, re.DOTALL):
            buffer += (match[1] or b"") + b"\n"
    return found


PIECES = st.sampled_from(
    [
        *(b"data", b"data:", b"data: a", b"data:b", b": c", b"event: e", b"id", b"\r", b"\n", b"\r\n", b"\n\n"),
        *(b"x", b" ", b"\xef\xbb\xbf", "é∞".encode(), b'{"a": 1}', b""),
    ]
)


@given(st.lists(PIECES, max_size=40).map(b"".join), st.lists(st.integers(0, 200), max_size=8))
def test_any_stream_gives_the_events_of_the_definition_for_any_split(stream: bytes, cuts: list[int]) -> None:
    bounds = sorted({0, len(stream), *(min(cut, len(stream)) for cut in cuts)})
    assert read_data(*(stream[begin:end] for begin, end in pairwise(bounds))) == read_by_definition(stream)


@pytest.mark.parametrize(
    "pieces",
    [
        [b"data: " + b"x" * 200],
        [b"data: "] + [b"x"] * 200,
        [b"data: " + b"x" * 40 + b"\n"] * 4,
        [b"data\n"] * 200,
        [b": " + b"x" * 200 + b"\n"],
    ],
    ids=["a line", "a line in pieces", "lines of data", "empty lines of data", "a comment"],
)
def test_an_event_without_an_end_is_refused_at_the_limit(pieces: list[bytes]) -> None:
    reader = EventReader(100)
    with pytest.raises(EventTooLong, match="the server sent an event of more than 100 bytes"):
        for piece in pieces:
            list(reader.add(piece))


def test_comments_between_events_do_not_count_toward_the_limit() -> None:
    stream = (b"data: " + b"x" * 40 + b"\n" + b": " + b"y" * 30 + b"\n\n") * 50
    assert read_data(*(stream[place : place + 7] for place in range(0, len(stream), 7))) == [b"x" * 40] * 50
    assert len(read(stream, max_bytes=100)) == 50

"""Tests of frames on a byte stream."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asterism.sandbox.inside.wire.frames import BrokenStream, FrameReader, encode_frame


@given(st.lists(st.dictionaries(st.text(), st.text() | st.integers())), st.integers(1, 7))
def test_frames_are_complete_whatever_the_chunks_of_the_stream(frames: list[dict[str, object]], size: int) -> None:
    stream = b"".join(encode_frame(frame) for frame in frames)
    reader = FrameReader()
    received = [frame for start in range(0, len(stream), size) for frame in reader.feed(stream[start : start + size])]
    assert received == frames


@pytest.mark.parametrize("stream", [b"\xff\xff\xff\xff", b"\x01\x00\x00\x00x", b"\x02\x00\x00\x0012"])
def test_an_invalid_frame_breaks_the_stream(stream: bytes) -> None:
    with pytest.raises(BrokenStream):
        FrameReader().feed(stream)

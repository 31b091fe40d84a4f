"""What is packed is unpacked as it was, whatever it is; and arrays get shorter than DEFLATE alone makes them."""

from __future__ import annotations

import random
import zlib
from array import array

from hypothesis import given
from hypothesis import strategies as st

from bus.packing import LEAST_BYTES, pack, plain, unpack

frames = st.binary(max_size=40) | st.builds(
    lambda part, times, end: part * times + end,
    st.binary(min_size=1, max_size=40),
    st.integers(1, 200),
    st.binary(max_size=5),
)


@given(frames)
def test_any_bytes_come_back(frame: bytes) -> None:
    assert unpack(pack(frame)) == frame
    assert unpack(plain(frame)) == frame
    assert len(pack(frame)) <= len(frame) + 1


@given(st.integers(0, 7), st.lists(st.integers(0, 151_000), min_size=LEAST_BYTES // 4, max_size=400))
def test_arrays_come_back_wherever_they_begin(offset: int, ids: list[int]) -> None:
    frame = b"\x93" + b"x" * offset + array("i", ids).tobytes()
    assert unpack(pack(frame)) == frame


def test_arrays_get_shorter_than_without_their_planes() -> None:
    draw = random.Random(0)
    ids = array("i", [int(151_000 * draw.random() ** 6) for _ in range(2000)]).tobytes()
    logprobs = array("f", [-(draw.random() ** 8) for _ in range(2000)]).tobytes()
    frame = b"\x93..." + ids + logprobs + b"\x05\x00\x00\x00" * 2000
    assert len(pack(frame)) < 0.95 * len(zlib.compress(frame, 1))

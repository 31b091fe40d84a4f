"""Tests: compression of frames is lossless, and a byte shuffle makes compressed arrays shorter."""

import random
import zlib
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asterism.bus.event_log.compression import (
    MIN_COMPRESSED_BYTES,
    compress_frame,
    decompress_frame,
    store_uncompressed,
)
from asterism.bus.transport.packets import MAX_FRAME_BYTES

frames = st.binary(max_size=40) | st.builds(
    lambda part, times, end: part * times + end,
    st.binary(min_size=1, max_size=40),
    st.integers(1, 200),
    st.binary(max_size=5),
)


@given(frames)
def test_compression_is_lossless(frame: bytes) -> None:
    assert decompress_frame(compress_frame(frame)) == frame
    assert decompress_frame(store_uncompressed(frame)) == frame
    assert len(compress_frame(frame)) <= len(frame) + 1


@given(st.integers(0, 7), st.integers(MIN_COMPRESSED_BYTES // 4, 400), st.integers(0, 2**32))
def test_arrays_at_any_offset_are_restored(offset: int, count: int, seed: int) -> None:
    ids = random.Random(seed).choices(range(151_000), k=count)
    frame = b"\x93" + b"x" * offset + array("i", ids).tobytes()
    assert decompress_frame(compress_frame(frame)) == frame


def test_a_byte_shuffle_makes_compressed_arrays_shorter() -> None:
    draw = random.Random(0)
    ids = array("i", [int(151_000 * draw.random() ** 6) for _ in range(2000)]).tobytes()
    logprobs = array("f", [-(draw.random() ** 8) for _ in range(2000)]).tobytes()
    frame = b"\x93..." + ids + logprobs + b"\x05\x00\x00\x00" * 2000
    assert len(compress_frame(frame)) < 0.95 * len(zlib.compress(frame, 1))


@pytest.mark.slow
@pytest.mark.parametrize("marker", [b"\x01", b"\x02"])
def test_a_small_frame_that_expands_beyond_the_limit_is_refused(marker: bytes) -> None:
    encoder = zlib.compressobj(9)
    bomb = b"".join(encoder.compress(bytes(1 << 20)) for _ in range(65)) + encoder.flush()
    assert len(bomb) < MAX_FRAME_BYTES / 500
    with pytest.raises(zlib.error, match="expands to more than 67,108,864 bytes"):
        decompress_frame(marker + bomb)


@pytest.mark.parametrize("marker", [b"\x01", b"\x02"])
def test_a_truncated_or_lengthened_frame_is_refused(marker: bytes) -> None:
    packed = marker + zlib.compress(bytes(1000))
    assert decompress_frame(packed) == bytes(1000)
    for damaged in (packed[:-1], packed + b"x"):
        with pytest.raises(zlib.error):
            decompress_frame(damaged)

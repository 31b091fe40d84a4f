"""Which lane a message travels in, known from its kind or from its bytes alike."""

from __future__ import annotations

from typing import get_args

import pytest

from bus.codec import begins_with, encode, head_of
from bus.lanes import BULK, CONTROL, lane_of, lane_of_frame
from bus.messages import AnyMessage, CodeRequested, Envelope, LeaseReleased, SessionEnded, TrajectoryFinished

KINDS: tuple[type[AnyMessage], ...] = get_args(AnyMessage)


def frame_of(kind: type[AnyMessage], sender: str = "a", to: str = "b") -> bytes:
    """As much of a message as its lane depends on: every field is an empty one."""
    return bytes((0x93, 0xA0 + len(sender))) + sender.encode() + bytes((0xA0 + len(to),)) + to.encode() + head_of(kind)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_the_bytes_tell_the_lane_of_every_kind(kind: type[AnyMessage]) -> None:
    assert lane_of_frame(frame_of(kind)) == lane_of(kind.__name__)


def test_tokens_and_calls_are_bulk_and_the_rest_is_control() -> None:
    names = {kind.__name__ for kind in KINDS}
    bulk = {name for name in names if lane_of(name) == BULK}
    assert {"TurnRequested", "TurnGenerated", "TrajectoryFinished", "BatchReady", "CodeRequested"} <= bulk
    assert len(bulk) == 15
    assert {"Shutdown", "LeaseGranted", "StartGroup", "ExecutorLeft", "WeightsPublished"} <= names - bulk


def test_a_message_of_many_fields_has_a_head() -> None:
    message = TrajectoryFinished(1, 2, 1.0, "length", 3, b"", b"", b"", b"", 1, 0, 0, 0, 0, 0, 0.0, 0.0, 0.0, 0.0)
    assert len(TrajectoryFinished.__struct_fields__) > 15
    assert lane_of_frame(encode(Envelope("rollout-0", "head/buffer", message))) == BULK


@pytest.mark.parametrize("address", ["a", "executor-0/1", "a" * 31, "a" * 32, "a" * 255, "a" * 256])
def test_a_kind_is_known_by_its_head_whatever_the_addresses(address: str) -> None:
    heads = (head_of(CodeRequested), head_of(SessionEnded))
    called = CodeRequested(7, 0, "jupyter_code", "1", "")
    for envelope in (Envelope(address, "b", called), Envelope("b", address, SessionEnded(7))):
        assert begins_with(encode(envelope), heads) == (len(address) < 256)
    assert not begins_with(encode(Envelope(address, address, LeaseReleased(7, 5))), heads)


@pytest.mark.parametrize("frame", [b"", b"\x93", b"\x93\xa1a", b"\x93\xd9", b"\xc1 nonsense"])
def test_what_is_no_envelope_is_control(frame: bytes) -> None:
    assert lane_of_frame(frame) == CONTROL

"""Tests: the lane of a message is determined by its kind, and by the first bytes of its encoded frame."""

import pytest

from asterism.bus import messages as msg
from asterism.bus.codec import build_kind_prefix, encode, has_kind_prefix
from asterism.bus.lanes import BULK, CONTROL, select_frame_lane, select_lane
from tests.bus.samples import KINDS


def make_frame(kind: type[msg.AnyMessage], sender: str = "a", to: str = "b") -> bytes:
    """Return the first bytes of a frame, which determine its lane."""
    texts = [bytes((0xA0 + len(text),)) + text.encode() for text in (sender, to)]
    return b"\x93" + b"".join(texts) + build_kind_prefix(kind)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_frame_uses_the_lane_of_its_kind(kind: type[msg.AnyMessage]) -> None:
    assert select_frame_lane(make_frame(kind)) == select_lane(kind.__name__)


def test_only_messages_with_tokens_or_calls_use_the_bulk_lane() -> None:
    names = {kind.__name__ for kind in KINDS}
    bulk = {name for name in names if select_lane(name) == BULK}
    assert {
        *("TurnRequested", "TurnGenerated", "TrajectoryFinished", "GroupAccepted", "BatchReady", "CodeRequested")
    } <= bulk
    assert len(bulk) == 19
    assert {"Shutdown", "LeaseGranted", "StartGroup", "ExecutorLeft", "WeightsPublished"} <= names - bulk


def test_the_lane_of_a_message_with_many_fields_is_detected() -> None:
    message = msg.TrajectoryFinished(
        1, 2, 1.0, "length", msg.TokenRecord(3, b"", b"", b"", b""), 1, 0, 0, 0, 0, 0, 0, 0.0, 0.0, 0.0, 0.0
    )
    assert 1 + len(msg.TrajectoryFinished.__struct_fields__) > 15  # too many for the short array header
    assert select_frame_lane(encode(msg.Envelope("rollout-0", "head/buffer", message))) == BULK


@pytest.mark.parametrize("address", ["a", "executor-0/1", "a" * 31, "a" * 32, "a" * 255, "a" * 256])
def test_the_prefix_of_a_frame_determines_its_kind_for_all_addresses(address: str) -> None:
    prefixes = (build_kind_prefix(msg.CodeRequested), build_kind_prefix(msg.SessionEnded))
    called = msg.CodeRequested(7, 0, "jupyter_code", "1", "")
    for envelope in (msg.Envelope(address, "b", called), msg.Envelope("b", address, msg.SessionEnded(7))):
        assert has_kind_prefix(encode(envelope), prefixes) == (len(address) < 256)
    assert not has_kind_prefix(encode(msg.Envelope(address, address, msg.LeaseReleased(7, 5))), prefixes)


@pytest.mark.parametrize("frame", [b"", b"\x93", b"\x93\xa1a", b"\x93\xd9", b"\xc1 nonsense"])
def test_malformed_frames_use_the_control_lane(frame: bytes) -> None:
    assert select_frame_lane(frame) == CONTROL

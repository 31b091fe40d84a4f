"""The sandbox's pure parts: frames, flavours, plain verdicts, cut output."""

from __future__ import annotations

import asyncio
import os
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.flavours import flavour_of
from sandbox.grading import plain_verdict
from sandbox.inside.children import Captured
from sandbox.inside.frames import BrokenStream, FrameReader, encode
from sandbox.pool import ForkServerLink
from sandbox.sessions import Sessions


@given(st.lists(st.dictionaries(st.text(), st.text() | st.integers())), st.integers(1, 7))
def test_frames_arrive_whole_however_the_stream_is_cut(frames: list[dict[str, object]], size: int) -> None:
    stream = b"".join(encode(frame) for frame in frames)
    reader = FrameReader()
    arrived = [frame for start in range(0, len(stream), size) for frame in reader.feed(stream[start : start + size])]
    assert arrived == frames


@pytest.mark.parametrize("stream", [b"\xff\xff\xff\xff", b"\x01\x00\x00\x00x", b"\x02\x00\x00\x0012"])
def test_what_is_no_frame_is_said(stream: bytes) -> None:
    with pytest.raises(BrokenStream):
        FrameReader().feed(stream)


@pytest.mark.parametrize(
    ("code", "flavour"),
    [
        ("print(1)", "bare"),
        ("import numpy as np", "scientific"),
        ("if True:\n    from sympy.solvers import solve", "scientific"),
        ("print('numpy')", "bare"),
        ("import numpy as (", "bare"),
        ("from .numpy import x", "bare"),
        ("import mynumpy", "bare"),
    ],
)
def test_the_flavour_follows_the_imports(code: str, flavour: str) -> None:
    assert flavour_of(code) == flavour


@pytest.mark.parametrize(
    ("answer", "truth", "verdict"),
    [
        ("42", "42", True),
        (" 42.0 ", "42", True),
        ("$-0$", "0", True),
        ("+7", "007.00", True),
        ("41", "42", False),
        (".5", "0.50", True),
        ("0.5", "0.05", False),
        ("9" * 10_000, "9" * 10_000, True),
        ("\\frac{1}{2}", "\\frac{1} {2}", True),
        ("\\frac{1}{2}", "0.5", None),
        ("1,000", "1000", None),
        ("", "3", None),
        ("x" * 5000, "3", False),
    ],
)
def test_plain_answers_need_no_mathematics(answer: str, truth: str, verdict: bool | None) -> None:
    assert plain_verdict(answer, truth) is verdict


@given(st.text(min_size=1), st.integers(0, 40))
def test_cut_output_ends_with_a_whole_character_and_counts_the_rest(text: str, limit: int) -> None:
    raw = text.encode("utf-8", "replace")[:4096]
    read, write = os.pipe()
    try:
        os.set_blocking(read, False)
        os.write(write, raw)
        captured = Captured(read, limit)
        captured.drain()
        kept, cut = captured.take()
    finally:
        os.close(read)
        os.close(write)
    assert cut == max(0, len(raw) - limit)
    if cut:
        assert raw.startswith(kept.encode())
        assert limit - len(kept.encode()) < 4


def _notebooks(count: int, live: int) -> Sessions:
    """So many with a process each, the first used longest ago."""
    sessions = Sessions(live)
    for number in range(count):
        session = sessions.of(number, "bare")
        session.server = cast(ForkServerLink, SimpleNamespace(alive=True))
    return sessions


def test_the_notebook_used_longest_ago_makes_room_for_one_more() -> None:
    sessions = _notebooks(3, live=3)
    sessions.of(0, "bare")
    assert sessions.to_evict(0, pressed=False) == []
    assert sessions.to_evict(1, pressed=False) == [sessions.of(1, "bare")]


def test_a_notebook_whose_cell_runs_keeps_its_process() -> None:
    async def scenario() -> None:
        sessions = _notebooks(2, live=2)
        await sessions.of(0, "bare").turn.acquire()
        sessions.of(1, "bare")
        assert sessions.to_evict(1, pressed=False) == [sessions.of(1, "bare")]

    asyncio.run(scenario())


def test_where_memory_is_short_some_idle_notebooks_end_though_they_are_few() -> None:
    sessions = _notebooks(33, live=512)
    assert [session.number for session in sessions.to_evict(0, pressed=True)] == [1, 2, 3]
    assert _notebooks(0, live=512).to_evict(1, pressed=True) == []

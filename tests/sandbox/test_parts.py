"""The sandbox's pure parts: frames, flavours, plain verdicts, cut output, folders, turns of long calls."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.flavours import flavour_of
from sandbox.grading import plain_verdict
from sandbox.inside.children import Captured
from sandbox.inside.folders import remove_folder
from sandbox.inside.frames import BrokenStream, FrameReader, encode
from sandbox.inside.turns import TURN_CPU_S, Turns
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
        ("import numpy as np", "numpy"),
        ("import numpy, sympy", "scientific"),
        ("import scipy.stats\nprint('sympy')", "numpy"),
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


@pytest.mark.slow
def test_a_folder_goes_away_however_deep_and_closed_it_is_and_nothing_else(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("x")
    kept.chmod(0o600)
    folder = tmp_path / "call"
    folder.mkdir()
    (folder / "link").symlink_to(kept)
    (folder / "far").symlink_to(tmp_path)
    at = os.open(folder, os.O_RDONLY)
    for _ in range(1100):
        os.mkdir("a folder with a long name", dir_fd=at)
        inner = os.open("a folder with a long name", os.O_RDONLY, dir_fd=at)
        os.close(os.open("file", os.O_CREAT, dir_fd=inner))
        os.fchmod(at, 0o500)
        os.close(at)
        at = inner
    os.close(at)
    remove_folder(str(folder))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept"]
    assert kept.read_text() == "x"
    assert kept.stat().st_mode & 0o777 == 0o600


def test_as_many_long_calls_run_as_may_and_those_that_wait_get_their_turn():
    turns: Turns[str] = Turns(1)
    assert turns.note("first", 0.01, 0, busy=True) == ([], [])
    assert turns.note("second", 0.01, 0, busy=True) == (["second"], [])
    assert turns.note("first", TURN_CPU_S / 2, 0, busy=True) == ([], [])
    assert turns.note("first", TURN_CPU_S / 2, 0, busy=True) == (["first"], ["second"])
    assert turns.had_one("first")
    assert not turns.had_one("second")
    assert turns.leave("second") == ([], ["first"])


def test_among_long_calls_that_had_as_many_turns_the_one_that_holds_most_memory_goes_first():
    turns: Turns[str] = Turns(1)
    for name, held in (("runs", 0), ("small", 1), ("large", 9), ("middle", 5)):
        turns.note(name, 0.0, held, busy=True)
    assert turns.leave("runs") == ([], ["large"])
    assert turns.leave("large") == ([], ["middle"])


def test_a_long_call_that_wants_no_processor_takes_no_turn_from_another():
    turns: Turns[str] = Turns(1)
    turns.note("sleeps", 0.1, 0, busy=True)
    assert turns.note("computes", 0.1, 0, busy=True) == (["computes"], [])
    assert turns.note("sleeps", 0.0, 0, busy=False) == ([], ["computes"])
    assert turns.note("sleeps", 0.1, 0, busy=True) == (["sleeps"], [])


@given(
    st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["note", "idle", "leave"]), st.floats(0, 1))),
    st.integers(1, 3),
)
def test_of_the_long_calls_that_want_a_processor_never_more_run_than_may_nor_fewer(
    events: list[tuple[int, str, float]], num_running: int
) -> None:
    turns: Turns[int] = Turns(num_running)
    stopped: set[int] = set()
    busy: set[int] = set()
    for call, event, cpu_s in events:
        if event == "leave":
            busy.discard(call)
            to_stop, to_go = turns.leave(call)
            stopped.discard(call)
        else:
            (busy.add if event == "note" or call in stopped else busy.discard)(call)
            to_stop, to_go = turns.note(call, 0.0 if call in stopped else cpu_s, 0, event == "note")
        assert set(to_go) <= stopped
        assert not set(to_stop) & stopped
        stopped = (stopped | set(to_stop)) - set(to_go)
        assert stopped <= busy
        assert len(busy - stopped) == min(len(busy), num_running)

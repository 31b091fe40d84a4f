"""Tests of output pipes and of answers of calls."""

import os
import socket
import struct
from collections.abc import Generator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asterism.sandbox.inside.server.call_process_handle import CallProcess, OutputPipe


@given(st.text(min_size=1), st.integers(0, 40))
def test_cut_output_ends_with_a_whole_character_and_counts_the_rest(text: str, limit: int) -> None:
    raw = text.encode("utf-8", "replace")[:4096]
    read, write = os.pipe()
    try:
        os.set_blocking(read, False)
        os.write(write, raw)
        pipe = OutputPipe(read, limit)
        pipe.drain()
        head, num_cut = pipe.pop_text()
    finally:
        os.close(read)
        os.close(write)
    assert num_cut == max(0, len(raw) - limit)
    if num_cut:
        assert raw.startswith(head.encode())
        assert limit - len(head.encode()) < 4


@contextmanager
def running_cell() -> Generator[tuple[CallProcess, socket.socket]]:
    """Yield the first call of a notebook, and the end of the socket that the notebook uses."""
    control, inside = socket.socketpair()
    pipes = [OutputPipe(os.open(os.devnull, os.O_RDONLY), 0) for _ in range(2)]
    with control, inside:
        control.setblocking(False)
        process = CallProcess(os.getpid(), control, *pipes, folder=None, uid=None, cgroup=None)
        process.notebook_id = 1
        process.assign_call({"id": 1}, nonce=7, now=0.0, limit_s=1.0)
        yield process, inside
        process.close()


def test_only_the_first_call_of_a_process_takes_its_start_from_the_report() -> None:
    with running_cell() as (process, inside):
        assert not process.update_start(0.2)
        inside.send(struct.pack("<cddII", b"s", 0.5, 0.0, os.getpid(), 0))
        process.read_outcome(1000)
        assert (process.update_start(0.6), process.started_at) == (True, 0.5)
        process.clear_call()
        process.assign_call({"id": 2}, nonce=8, now=10.0, limit_s=1.0)
        inside.send(struct.pack("<cddII", b"s", 10.9, 0.0, os.getpid(), 0))
        process.read_outcome(1000)
        assert (process.update_start(10.95), process.started_at) == (True, 10.0)


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_notebook_cannot_report_a_lost_state_after_the_code_has_begun(has_begun: bool) -> None:
    with running_cell() as (process, inside):
        started = struct.pack("<cddII", b"s", 0.0, 0.0, os.getpid(), 0)
        inside.send((started if has_begun else b"") + struct.pack("<cIQI", b"a", 4, 7, 0) + b"lost")
        assert process.read_outcome(1000) is not has_begun
        assert process.outcome == (None if has_begun else ["lost"])

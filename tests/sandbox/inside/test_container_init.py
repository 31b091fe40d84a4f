"""The init process of a container reports a fork that the kernel refuses."""

import errno
import os
import socket

import pytest

from asterism.sandbox.inside.container_init import ContainerInit
from asterism.sandbox.inside.wire.frames import FrameReader, encode_frame
from asterism.sandbox.inside.wire.server_settings import ServerSettings


def test_a_refused_fork_is_reported_and_the_init_process_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", refuse)
    settings = ServerSettings("bare", False, (), 1.0, 1, 1, 1, 1).to_json()
    executor_end, init_end = socket.socketpair()
    with executor_end, init_end:
        start = {"op": "start", "token": "t", "module": "asterism.sandbox.inside.server.boot", "settings": settings}
        executor_end.sendall(encode_frame(start) + encode_frame(start | {"token": "u"}))
        executor_end.shutdown(socket.SHUT_WR)
        ContainerInit(init_end, "secret").serve()
        _hello, *ends = FrameReader().feed(executor_end.recv(1 << 16))
    assert [end["ended"] for end in ends] == ["t", "u"]

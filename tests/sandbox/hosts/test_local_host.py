"""Failures of the local host to start a process."""

import errno
import socket

import pytest

from sandbox.contract import SandboxFailure
from sandbox.hosts.local_host import LocalHost
from sandbox.inside.wire.server_settings import ServerSettings


def test_a_process_that_cannot_be_started_is_an_infrastructure_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socket, "socketpair", refuse)
    launch = LocalHost().launch("sandbox.inside.server.boot", ServerSettings("bare", False, (), 1.0, 1, 1, 1, 1))
    with pytest.raises(SandboxFailure, match="Too many open files"), pytest.raises(StopIteration):
        launch.send(None)

"""Tests of the local host: a process that cannot be started, and the session of a starting process."""

import errno
import os
import socket

import pytest

from asterism.sandbox.contract import SandboxFailure
from asterism.sandbox.hosts.local_host import LocalHost
from asterism.sandbox.inside.wire.server_settings import ServerSettings

SETTINGS = ServerSettings("bare", False, (), 1.0, 1, 1, 1, 1)


@pytest.mark.real_clock
async def test_a_starting_process_is_not_in_the_session_of_the_terminal() -> None:
    process = await LocalHost().launch("asterism.sandbox.inside.server.boot", SETTINGS)
    try:
        assert os.getsid(process.pid) == process.pid  # the process has a new session before its first line of code
    finally:
        process.kill()
        await process.wait()
        process.socket.close()


def test_a_process_that_cannot_be_started_is_an_infrastructure_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socket, "socketpair", refuse)
    launch = LocalHost().launch("asterism.sandbox.inside.server.boot", SETTINGS)
    with pytest.raises(SandboxFailure, match="Too many open files"), pytest.raises(StopIteration):
        launch.send(None)

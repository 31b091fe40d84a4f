"""Tests of a grader process that cannot start, and of a grader process that crashes."""

import asyncio
import errno
from collections.abc import Callable

import pytest

from asterism.sandbox.contract import Grade, SandboxFailure
from asterism.sandbox.hosts.local_host import LocalHost, LocalProcess
from asterism.sandbox.inside.wire.frames import Frame
from asterism.sandbox.inside.wire.server_settings import ServerSettings
from asterism.sandbox.pool import grader_client
from asterism.sandbox.pool.grader_client import GraderClient


@pytest.mark.real_clock
async def test_gradings_fail_immediately_if_the_grader_cannot_start() -> None:
    class RefusingHost(LocalHost):
        async def launch(self, module: str, settings: ServerSettings) -> LocalProcess:
            raise OSError(errno.EMFILE, "Too many open files")

    grader = GraderClient(RefusingHost(), ServerSettings("bare", False, (), 1.0, 1, 1, 1, 1))
    for _ in range(2):
        with pytest.raises(SandboxFailure, match="the grader cannot start"):
            await asyncio.wait_for(grader.grade("x+1", "1+x"), 30)
    await grader.close()


class _MortalConnection:
    """A connection to a grader that grades correctly, but exits on the answer "fatal"."""

    pid = 1
    num_started = 0

    def __init__(
        self, host: object, module: str, on_frame: Callable[[Frame], None], on_end: Callable[[], None]
    ) -> None:
        self._on_frame, self._on_end = on_frame, on_end

    async def start(self, settings: ServerSettings) -> None:
        type(self).num_started += 1

    def send(self, frame: Frame) -> None:
        loop = asyncio.get_running_loop()
        if frame["answer"] == "fatal":
            loop.call_soon(self._on_end)
        else:
            loop.call_later(0.01, self._on_frame, {"id": frame["id"], "correct": True, "duration_s": 0.5})

    async def stop(self) -> None:
        pass


@pytest.mark.real_clock
async def test_a_request_fails_after_two_graders_crash_and_other_requests_are_graded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grader_client, "ServerConnection", _MortalConnection)
    monkeypatch.setattr(_MortalConnection, "num_started", 0)

    grader = GraderClient(LocalHost(), ServerSettings("grader", False, (), 1.0, 1, 1, 1, 1))
    fatal = asyncio.create_task(grader.grade("fatal", "x"))
    with pytest.raises(SandboxFailure, match="grader died"):
        await fatal
    assert _MortalConnection.num_started == 2
    assert await grader.grade("y", "x") == Grade(True, 0.5)
    assert _MortalConnection.num_started == 3
    await grader.close()

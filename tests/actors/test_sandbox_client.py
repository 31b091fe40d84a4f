"""The client of a served sandbox: each question gets its own answer, and nobody waits for a server that has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from actors import sandbox_client
from actors.sandbox_client import SERVED, SandboxClient, is_served
from bus.messages import (
    AnswerGraded,
    AnswerSubmitted,
    AnyMessage,
    CallFailed,
    CodeFinished,
    CodeOk,
    CodeRequested,
    ExecutorJoined,
    Output,
    SessionEnded,
)
from bus.transport import Bus
from bus.zeromq import zmq_bus
from configs.errors import UnusableInput
from sandbox.contract import CodeResult, Grade, SandboxFailure

LIFE = f"{SERVED}/1"


class Server:
    """Answers what a test has it answer."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.client = ""

    async def hear(self) -> AnyMessage:
        envelope = await self.bus.receive()
        self.client = envelope.sender
        return envelope.message

    async def say(self, message: AnyMessage) -> None:
        await self.bus.send(self.client, message)


def play(folder: Path, scenario: Callable[[Server, SandboxClient], Coroutine[Any, Any, None]]) -> None:
    async def live() -> None:
        bus = zmq_bus(SERVED, folder, 100)
        try:
            async with SandboxClient(folder) as client:
                await scenario(Server(bus), client)
        finally:
            await bus.close()

    asyncio.run(asyncio.wait_for(live(), 30))


def call(trajectory: int, number: int) -> CodeRequested:
    return CodeRequested(trajectory, number, "jupyter_code", "1", "")


def printed(text: str) -> CodeOk:
    return CodeOk(Output(text))


def test_answers_find_who_asked_whatever_their_order(tmp_path: Path) -> None:
    async def scenario(server: Server, client: SandboxClient) -> None:
        first, second = asyncio.create_task(client.run(call(7, 0))), asyncio.create_task(client.run(call(7, 1)))
        graded = asyncio.create_task(client.grade(AnswerSubmitted(7, "2", "2")))
        assert [await server.hear() for _ in range(3)] == [call(7, 0), call(7, 1), AnswerSubmitted(7, "2", "2")]
        await server.say(AnswerGraded(7, True, 0.3, LIFE))
        await server.say(CodeFinished(7, 1, printed("second"), 0.2, LIFE))
        await server.say(CodeFinished(7, 0, printed("first"), 0.1, LIFE))
        assert await first == CodeResult(printed("first"), 0.1)
        assert await second == CodeResult(printed("second"), 0.2)
        assert await graded == Grade(True, 0.3)
        await client.end_session(7)
        assert await server.hear() == SessionEnded(7)

    play(tmp_path, scenario)
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith("client-")]


def test_what_breaks_there_is_a_failure_here_and_the_call_may_be_made_again(tmp_path: Path) -> None:
    async def scenario(server: Server, client: SandboxClient) -> None:
        for cause in ("a fork server died", "no room"):
            running = asyncio.create_task(client.run(call(7, 0)))
            await server.hear()
            await server.say(CallFailed(7, 0, cause, LIFE))
            with pytest.raises(SandboxFailure, match=cause):
                await running

    play(tmp_path, scenario)


def test_the_same_question_twice_at_once_is_refused(tmp_path: Path) -> None:
    async def scenario(server: Server, client: SandboxClient) -> None:
        running = asyncio.create_task(client.run(call(7, 0)))
        await server.hear()
        with pytest.raises(ValueError, match="trajectory 7 asks twice at once"):
            await client.run(call(7, 0))
        await server.say(CodeFinished(7, 0, printed("4"), 0.1, LIFE))
        assert (await running).outcome == printed("4")

    play(tmp_path, scenario)


def test_frames_that_are_no_answer_to_it_change_nothing(tmp_path: Path) -> None:
    async def scenario(server: Server, client: SandboxClient) -> None:
        running = asyncio.create_task(client.run(call(7, 0)))
        await server.hear()
        await server.bus.send_frame(server.client, b"no message")
        await server.say(ExecutorJoined(LIFE, 4))
        await server.say(CodeFinished(8, 0, printed("nobody asked"), 0.1, LIFE))
        await server.say(CodeFinished(7, 0, printed("4"), 0.1, LIFE))
        assert (await running).outcome == printed("4")

    play(tmp_path, scenario)


def test_who_asks_a_server_that_has_ended_is_told_before_and_after_it_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox_client, "_WATCH_S", 0.01)

    async def scenario(server: Server, client: SandboxClient) -> None:
        running = asyncio.create_task(client.run(call(7, 0)))
        await server.hear()
        await server.bus.close()
        assert not is_served(tmp_path)
        with pytest.raises(SandboxFailure, match="the sandbox is served no longer"):
            await running
        with pytest.raises(SandboxFailure, match="the sandbox is served no longer"):
            await client.run(call(7, 1))

    play(tmp_path, scenario)


def test_a_folder_in_which_nothing_is_served_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnusableInput, match=f"start one: asterism sandbox serve --at {tmp_path}"):
        SandboxClient(tmp_path)

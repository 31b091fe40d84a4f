"""The client of a served sandbox matches results to requests and detects the server's end."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from asterism.actors.sandbox_service import sandbox_client
from asterism.actors.sandbox_service.sandbox_client import SERVED_ADDRESS, SandboxClient, is_served
from asterism.bus import messages as msg
from asterism.bus.bus import Bus
from asterism.bus.transport.zeromq import open_zmq_bus
from asterism.configs.errors import UnusableInput
from asterism.sandbox.contract import CodeResult, Grade, SandboxFailure

pytestmark = [pytest.mark.real_clock, pytest.mark.timeout(30)]

LIFE = f"{SERVED_ADDRESS}/1"


class Server:
    """A server that a test controls."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.client = ""

    async def receive(self) -> msg.AnyMessage:
        envelope = await self.bus.receive()
        self.client = envelope.sender
        return envelope.message

    async def send(self, message: msg.AnyMessage) -> None:
        await self.bus.send(self.client, message)


@pytest.fixture
@asynccontextmanager
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    bus = open_zmq_bus(SERVED_ADDRESS, tmp_path, 100)
    yield Server(bus)
    await bus.close()


def list_client_sockets(folder: Path) -> list[Path]:
    return list(folder.glob("client-*"))


@pytest.fixture
@asynccontextmanager
async def client(tmp_path: Path) -> AsyncIterator[SandboxClient]:
    async with SandboxClient(tmp_path) as client:
        yield client
    assert list_client_sockets(tmp_path) == []


def call(trajectory: int, number: int) -> msg.CodeRequested:
    return msg.CodeRequested(trajectory, number, "jupyter_code", "1", "")


def printed(text: str) -> msg.CodeOk:
    return msg.CodeOk(msg.Output(text))


async def begin(server: Server, client: SandboxClient, number: int = 0) -> asyncio.Task[CodeResult]:
    """Start a call, and wait until the server has received the call."""
    running = asyncio.create_task(client.run(call(7, number)))
    assert await server.receive() == call(7, number)
    return running


async def test_results_are_matched_to_requests_in_any_order(server: Server, client: SandboxClient) -> None:
    first, second = asyncio.create_task(client.run(call(7, 0))), asyncio.create_task(client.run(call(7, 1)))
    graded = asyncio.create_task(client.grade(msg.AnswerSubmitted(7, "2", "2")))
    assert [await server.receive() for _ in range(3)] == [call(7, 0), call(7, 1), msg.AnswerSubmitted(7, "2", "2")]
    await server.send(msg.AnswerGraded(7, 1.0, 0.3, LIFE))
    await server.send(msg.CodeFinished(7, 1, printed("second"), 0.2, LIFE))
    await server.send(msg.CodeFinished(7, 0, printed("first"), 0.1, LIFE))
    assert await first == CodeResult(printed("first"), 0.1)
    assert await second == CodeResult(printed("second"), 0.2)
    assert await graded == Grade(True, 0.3)
    await client.end_notebook(7)
    assert await server.receive() == msg.SessionEnded(7)


async def test_a_server_failure_is_raised_and_the_call_can_be_repeated(server: Server, client: SandboxClient) -> None:
    for cause in ("a fork server died", "no room"):
        running = await begin(server, client)
        await server.send(msg.CallFailed(7, 0, cause, LIFE))
        with pytest.raises(SandboxFailure, match=cause):
            await running


async def test_a_request_that_is_in_flight_is_refused(server: Server, client: SandboxClient) -> None:
    running = await begin(server, client)
    with pytest.raises(ValueError, match="trajectory 7: the same request is already in flight"):
        await client.run(call(7, 0))
    await server.send(msg.CodeFinished(7, 0, printed("4"), 0.1, LIFE))
    assert (await running).outcome == printed("4")


async def test_unrelated_frames_are_ignored(server: Server, client: SandboxClient) -> None:
    running = await begin(server, client)
    await server.bus.send_frame(server.client, b"no message")
    await server.send(msg.ExecutorJoined(LIFE, 4))
    await server.send(msg.CodeFinished(8, 0, printed("unrequested"), 0.1, LIFE))
    await server.send(msg.CodeFinished(7, 0, printed("4"), 0.1, LIFE))
    assert (await running).outcome == printed("4")


async def test_requests_to_an_ended_server_fail(
    server: Server, client: SandboxClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox_client, "_POLL_INTERVAL_S", 0.01)
    running = await begin(server, client)
    await server.bus.close()
    assert not is_served(tmp_path)
    with pytest.raises(SandboxFailure, match="the sandbox server has ended"):
        await running
    with pytest.raises(SandboxFailure, match="the sandbox server has ended"):
        await client.run(call(7, 1))


def test_a_folder_without_a_served_sandbox_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnusableInput, match=f"start one with `asterism sandbox serve --at {tmp_path}`"):
        SandboxClient(tmp_path)


async def test_a_cancelled_call_is_stopped_and_its_notebook_is_restored(server: Server, client: SandboxClient) -> None:
    first = await begin(server, client)
    await server.send(msg.CodeFinished(7, 0, printed("a"), 0.1, LIFE))
    await first
    second = await begin(server, client, 1)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    assert [await server.receive(), await server.receive()] == [
        msg.SessionEnded(7),
        msg.SessionRestored(7, (call(7, 0),)),
    ]
    await client.end_notebook(7)
    assert await server.receive() == msg.SessionEnded(7)


async def test_a_restored_notebook_is_sent_before_its_next_cell(server: Server, client: SandboxClient) -> None:
    client.restore_notebook(7, [call(7, 0)])
    running = asyncio.ensure_future(client.run(call(7, 1)))
    assert [await server.receive(), await server.receive()] == [msg.SessionRestored(7, (call(7, 0),)), call(7, 1)]
    await server.send(msg.CodeFinished(7, 1, printed("a"), 0.1, LIFE))
    await running

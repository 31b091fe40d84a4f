"""Tests of calls to a Docker engine that hangs, and of cancelled container starts, with a fake engine."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from asterism.sandbox.contract import SandboxFailure
from asterism.sandbox.hosts.docker import docker_api
from asterism.sandbox.hosts.docker.docker_api import ContainerSpec, DockerEngine, OwnedContainer

pytestmark = pytest.mark.real_clock

SPEC = ContainerSpec("image", "run", "owner", Path("/tmp"), {}, 64, 8, 8, "")


async def test_requests_to_an_engine_that_hangs_time_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docker_api, "_REQUEST_TIMEOUT_S", 0.01)
    listener = socket.socket(socket.AF_UNIX)  # connections succeed, but requests get no answer
    listener.bind(str(tmp_path / "docker.sock"))
    listener.listen()
    engine = DockerEngine(f"unix://{tmp_path}/docker.sock")
    try:
        for request in (engine.query_info(), engine.has_image("any"), engine.list_owned(), engine.remove("any")):
            with pytest.raises(SandboxFailure):
                await asyncio.wait_for(request, 30)
    finally:
        await engine.close()
        listener.close()


@asynccontextmanager
async def serve_engine(
    folder: Path, answer: Callable[[str], Awaitable[tuple[int, str]]]
) -> AsyncGenerator[DockerEngine]:
    """Run a fake engine with a client. `answer` maps a request line to a status and a JSON body."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            while line := await reader.readline():
                length = 0
                while (header := await reader.readline()).strip():
                    name, _, value = header.decode().partition(":")
                    length = int(value) if name.lower() == "content-length" else length
                await reader.readexactly(length)
                status, body = await answer(line.decode())
                head = (
                    f"HTTP/1.1 {status} Status\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
                )
                writer.write((head + body).encode())

    server = await asyncio.start_unix_server(serve, folder / "docker.sock")
    engine = DockerEngine(f"unix://{folder}/docker.sock")
    yield engine
    await engine.close()
    server.close()
    await server.wait_closed()


async def test_a_cancelled_start_removes_the_container_that_the_engine_still_creates(tmp_path: Path) -> None:
    requested, cancelled, removed = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def answer(request: str) -> tuple[int, str]:
        if "containers/create" in request:
            requested.set()
            await cancelled.wait()
            return 201, '{"Id": "late-id", "Warnings": []}'
        if request.startswith("DELETE") and "late-id" in request:
            removed.set()
        return 200, '{"ApiVersion": "1.41"}'

    async with serve_engine(tmp_path, answer) as engine:
        starting = asyncio.create_task(engine.start(SPEC))
        await asyncio.wait_for(requested.wait(), 30)
        starting.cancel()
        asyncio.get_running_loop().call_soon(cancelled.set)
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert removed.is_set()


async def test_a_listed_container_without_details_is_left_out(tmp_path: Path) -> None:
    async def answer(request: str) -> tuple[int, str]:
        if "/containers/json" in request:
            return (
                200,
                '[{"Id": "gone", "Labels": {"asterism.owner": "a"}}, {"Id": "live", "Labels": {"asterism.owner": "b"}}]',
            )
        if "/containers/gone/json" in request:
            return 404, '{"message": "no such container"}'
        return 200, '{"ApiVersion": "1.41", "Id": "live"}'

    async with serve_engine(tmp_path, answer) as engine:
        assert await engine.list_owned() == [OwnedContainer("live", "b")]


IN_PROGRESS, ABSENT, BUSY = (409, "removal of container id is already in progress"), (404, "no such"), (500, "busy")


@pytest.mark.parametrize(
    ("answers", "num_waits"),
    [([IN_PROGRESS, ABSENT], 1), ([IN_PROGRESS, IN_PROGRESS, (204, "")], 2), ([IN_PROGRESS, BUSY, (204, "")], 1)],
    ids=["removed", "removal_failed", "removal_failed_and_the_mount_is_busy"],
)
async def test_a_removal_is_repeated_until_the_container_no_longer_exists(
    tmp_path: Path, answers: list[tuple[int, str]], num_waits: int
) -> None:
    requests: list[str] = []
    remaining = iter(answers)

    async def answer(request: str) -> tuple[int, str]:
        requests.append(request)
        if request.startswith("DELETE"):
            status, message = next(remaining)
            return status, f'{{"message": "{message}"}}' if message else ""
        return 200, '{"ApiVersion": "1.41", "StatusCode": 0}'

    async with serve_engine(tmp_path, answer) as engine:
        await engine.remove("id")
    assert next(remaining, None) is None
    assert sum("/containers/id/wait?condition=removed" in request for request in requests) == num_waits


async def test_a_container_that_cannot_be_removed_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docker_api, "_REMOVAL_DELAYS_S", (0.0, 0.0))

    async def answer(request: str) -> tuple[int, str]:
        status, message = BUSY if request.startswith("DELETE") else (200, "")
        return status, f'{{"ApiVersion": "1.41", "message": "{message}"}}'

    async with serve_engine(tmp_path, answer) as engine:
        with pytest.raises(SandboxFailure, match="cannot remove a container: busy"):
            await engine.remove("id")

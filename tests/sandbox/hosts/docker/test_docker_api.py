"""Calls to a Docker engine that hangs, and cancelled container starts, with a fake engine."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from pathlib import Path

import pytest

from sandbox.contract import SandboxFailure
from sandbox.hosts.docker import docker_api
from sandbox.hosts.docker.docker_api import ContainerSpec, DockerEngine

SPEC = ContainerSpec("image", "run", "owner", Path("/tmp"), {}, 64, 8, 8, "", "{}")


def test_requests_to_an_engine_that_hangs_time_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docker_api, "_REQUEST_TIMEOUT_S", 0.01)

    async def scenario() -> None:
        listener = socket.socket(socket.AF_UNIX)  # connections succeed, but get no answer
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

    asyncio.run(scenario())


def test_a_cancelled_start_removes_the_container_that_the_engine_still_creates(tmp_path: Path) -> None:
    async def scenario() -> None:
        requested, cancelled, removed = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.closing(writer):
                while line := await reader.readline():
                    length = 0
                    while (header := await reader.readline()).strip():
                        name, _, value = header.decode().partition(":")
                        length = int(value) if name.lower() == "content-length" else length
                    await reader.readexactly(length)
                    body = b'{"ApiVersion": "1.41"}'
                    if b"containers/create" in line:
                        requested.set()
                        await cancelled.wait()
                        body = b'{"Id": "late-id", "Warnings": []}'
                    elif line.startswith(b"DELETE") and b"late-id" in line:
                        removed.set()
                    head = b"HTTP/1.1 201 Created\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
                    writer.write(head % len(body) + body)

        server = await asyncio.start_unix_server(serve, tmp_path / "docker.sock")
        engine = DockerEngine(f"unix://{tmp_path}/docker.sock")
        starting = asyncio.create_task(engine.start(SPEC))
        await asyncio.wait_for(requested.wait(), 30)
        starting.cancel()
        asyncio.get_running_loop().call_soon(cancelled.set)
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert removed.is_set()
        await engine.close()
        server.close()
        await server.wait_closed()

    asyncio.run(asyncio.wait_for(scenario(), 60))

"""What fails around the fork servers, without an engine: the system's limits, an engine that hangs, strangers at the gate."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from pathlib import Path

import pytest

from configs.schema import Sandbox as SandboxConfig
from sandbox import docker_engine, gate, owner
from sandbox.choice import AutoHost
from sandbox.contract import SandboxFailure
from sandbox.docker_engine import ContainerSpec, DockerEngine
from sandbox.gate import Gate
from sandbox.grading import Grader
from sandbox.inside.frames import LENGTH, Frame, FrameReader, encode
from sandbox.inside.keeper import Keeper
from sandbox.inside.settings import Settings
from sandbox.owner import is_gone, owner_mark
from sandbox.process_backend import LocalHost, LocalProcess

SETTINGS = Settings("bare", False, (), 1.0, 1, 1, 1, 1)


SPEC = ContainerSpec("image", "run", "owner", Path("/tmp"), {}, 64, 8, 8, "", "{}")


def no_descriptors(*_: object) -> tuple[socket.socket, socket.socket]:
    raise OSError(errno.EMFILE, "Too many open files")


# ---------------------------------------------------------------- this machine


def test_a_process_that_cannot_be_started_is_a_failure_of_the_infrastructure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "socketpair", no_descriptors)
    launch = LocalHost().launch("sandbox.inside.boot", SETTINGS)
    with pytest.raises(SandboxFailure, match="Too many open files"), pytest.raises(StopIteration):
        launch.send(None)


def test_gradings_fail_and_do_not_wait_where_the_system_refuses_a_grader() -> None:
    class Refusing(LocalHost):
        async def launch(self, module: str, settings: Settings) -> LocalProcess:
            raise OSError(errno.EMFILE, "Too many open files")

    async def whole() -> None:
        grader = Grader(Refusing(), SETTINGS)
        for _ in range(2):
            with pytest.raises(SandboxFailure, match="the grader cannot start"):
                await asyncio.wait_for(grader.grade("x+1", "1+x"), 30)
        await grader.close()

    asyncio.run(whole())


# ---------------------------------------------------------------- the engine


def test_an_engine_that_hangs_is_a_failure_and_no_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docker_engine, "_ANSWER_S", 0.01)

    async def whole() -> None:
        listener = socket.socket(socket.AF_UNIX)  # accepts, and says nothing
        listener.bind(str(tmp_path / "docker.sock"))
        listener.listen()
        engine = DockerEngine(f"unix://{tmp_path}/docker.sock")
        try:
            for question in (engine.look(), engine.has_image("any"), engine.owned(), engine.remove("any")):
                with pytest.raises(SandboxFailure):
                    await asyncio.wait_for(question, 30)
        finally:
            await engine.close()
            listener.close()

    asyncio.run(whole())


def test_a_start_that_is_cancelled_leaves_no_container_though_the_engine_makes_it(tmp_path: Path) -> None:
    async def whole() -> None:
        asked, cancelled, removed = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while line := await reader.readline():
                length = 0
                while (header := await reader.readline()).strip():
                    name, _, value = header.decode().partition(":")
                    length = int(value) if name.lower() == "content-length" else length
                await reader.readexactly(length)
                body = b'{"ApiVersion": "1.41"}'
                if b"containers/create" in line:
                    asked.set()
                    await cancelled.wait()
                    body = b'{"Id": "made-all-the-same", "Warnings": []}'
                elif line.startswith(b"DELETE") and b"made-all-the-same" in line:
                    removed.set()
                head = b"HTTP/1.1 201 Created\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
                writer.write(head % len(body) + body)
            writer.close()

        server = await asyncio.start_unix_server(serve, tmp_path / "docker.sock")
        engine = DockerEngine(f"unix://{tmp_path}/docker.sock")
        starting = asyncio.create_task(engine.start(SPEC))
        await asyncio.wait_for(asked.wait(), 30)
        starting.cancel()
        asyncio.get_running_loop().call_soon(cancelled.set)
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert removed.is_set()
        await engine.close()
        server.close()
        await server.wait_closed()

    asyncio.run(asyncio.wait_for(whole(), 60))


def test_a_choice_of_backend_that_is_cancelled_closes_what_it_had_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[bool] = []

    async def never(self: object) -> None:
        await asyncio.Event().wait()

    async def close(self: object) -> None:
        closed.append(True)

    monkeypatch.setattr("sandbox.docker_backend.ContainerHost.start", never)
    monkeypatch.setattr("sandbox.docker_backend.ContainerHost.close", close)

    async def whole() -> None:
        starting = asyncio.create_task(AutoHost(SandboxConfig(), "").start())
        await asyncio.sleep(0)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting

    asyncio.run(whole())
    assert closed


# ---------------------------------------------------------------- the gate


async def knock(gate: Gate, said: bytes) -> bytes:
    """What comes back until the gate closes the connection."""
    reader, writer = await asyncio.open_unix_connection(str(gate.folder / "executor.sock"))
    writer.write(said)
    try:
        return await reader.read()
    finally:
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize(
    "said", [b"\x01\x00\x00\x00x", b"\x02\x00\x00\x0012", LENGTH.pack(1 << 20), encode({"secret": "a guess"})]
)
def test_the_gate_closes_to_who_does_not_say_a_secret_and_goes_on(said: bytes) -> None:
    unseen: list[object] = []

    async def whole() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unseen.append(context))
        arrivals: list[Frame] = []

        def arrive(frame: Frame, connection: socket.socket) -> bool:
            arrivals.append(frame)
            return False

        gate = Gate(arrive)
        gate.open()
        try:
            assert await asyncio.wait_for(knock(gate, said), 30) == b""
            assert await asyncio.wait_for(knock(gate, encode({"secret": "another"})), 30) == b""
            assert arrivals[-1] == {"secret": "another"}
        finally:
            await gate.close()

    asyncio.run(whole())
    assert unseen == []


def test_a_gate_that_was_out_of_descriptors_accepts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "_PAUSE_S", 0.0)

    async def whole() -> None:
        loop = asyncio.get_running_loop()
        accept, refusals = loop.sock_accept, [1, 2, 3]

        async def sometimes(listener: socket.socket) -> tuple[socket.socket, object]:
            if refusals:
                refusals.pop()
                no_descriptors()
            return await accept(listener)

        monkeypatch.setattr(loop, "sock_accept", sometimes)
        opened = Gate(lambda _frame, _connection: False)
        opened.open()
        try:
            assert await asyncio.wait_for(knock(opened, encode({"secret": "a guess"})), 30) == b""
        finally:
            await opened.close()

    asyncio.run(whole())


# ---------------------------------------------------------------- keeper, owner


def test_a_keeper_that_cannot_fork_says_so_and_lives_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", refuse)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        start = {"op": "start", "token": "t", "module": "sandbox.inside.boot", "settings": SETTINGS.to_json()}
        ours.sendall(encode(start) + encode(start | {"token": "u"}))
        ours.shutdown(socket.SHUT_WR)
        Keeper(theirs, "secret").serve()
        _hello, *ends = FrameReader().feed(ours.recv(1 << 16))
    assert [end["ended"] for end in ends] == ["t", "u"]


def test_a_process_of_another_namespace_is_not_known_to_be_gone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mark = owner_mark().rpartition("/")[0] + "/1"  # this process's number, but not its start
    assert is_gone(mark)
    elsewhere = tmp_path / "pid"
    elsewhere.symlink_to("pid:[1]")
    monkeypatch.setattr(owner, "_NUMBERED_IN", elsewhere)
    assert not is_gone(mark)

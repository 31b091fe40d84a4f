"""Tests of connections without a valid secret, a gate without free descriptors, and a cancelled start."""

import asyncio
import errno
import socket

import pytest

from asterism.configs.schema.machines import SandboxConfig
from asterism.sandbox.hosts.docker import connection_gate
from asterism.sandbox.hosts.docker.connection_gate import ConnectionGate
from asterism.sandbox.hosts.docker.docker_api import ContainerSpec, DockerEngine
from asterism.sandbox.hosts.docker.docker_host import ContainerHost
from asterism.sandbox.inside.container_init import SECRET_VARIABLE
from asterism.sandbox.inside.wire.frames import LENGTH, Frame, encode_frame

pytestmark = pytest.mark.real_clock


async def send_and_read_to_end(gate: ConnectionGate, payload: bytes) -> bytes:
    reader, writer = await asyncio.open_unix_connection(str(gate.folder / "executor.sock"))
    writer.write(payload)
    try:
        return await asyncio.wait_for(reader.read(), 30)
    finally:
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize(
    "payload", [b"\x01\x00\x00\x00x", b"\x02\x00\x00\x0012", LENGTH.pack(1 << 20), encode_frame({"secret": "a guess"})]
)
async def test_the_gate_closes_a_connection_without_a_valid_secret_and_accepts_the_next(payload: bytes) -> None:
    unhandled: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
    frames: list[Frame] = []

    def refuse(frame: Frame, connection: socket.socket) -> bool:
        frames.append(frame)
        return False

    gate = ConnectionGate(refuse)
    gate.open()
    try:
        assert gate.folder.parent.stat().st_mode & 0o777 == 0o700, "other users cannot connect"
        assert await send_and_read_to_end(gate, payload) == b""
        assert await send_and_read_to_end(gate, encode_frame({"secret": "another"})) == b""
        assert frames[-1] == {"secret": "another"}
    finally:
        await gate.close()
    assert unhandled == []


async def test_the_gate_works_again_after_it_ran_out_of_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_gate, "_ACCEPT_RETRY_S", 0.0)
    loop = asyncio.get_running_loop()
    accept, refusals = loop.sock_accept, [1, 2, 3]

    async def refuse_first(listener: socket.socket) -> tuple[socket.socket, object]:
        if refusals:
            refusals.pop()
            raise OSError(errno.EMFILE, "Too many open files")
        return await accept(listener)

    monkeypatch.setattr(loop, "sock_accept", refuse_first)
    gate = ConnectionGate(lambda _frame, _connection: False)
    gate.open()
    try:
        assert await send_and_read_to_end(gate, encode_frame({"secret": "a guess"})) == b""
    finally:
        await gate.close()


async def test_a_cancelled_start_closes_the_connection_of_the_container() -> None:
    connection, peer = socket.socketpair()

    class SlowEngine(DockerEngine):
        async def start(self, spec: ContainerSpec) -> str:
            """Connect like the container's init process, before the engine answers."""
            assert host._on_connection({"secret": spec.environment[SECRET_VARIABLE]}, connection)  # pyright: ignore
            starting.cancel()
            return await asyncio.Event().wait() or "never"

    host = ContainerHost(SandboxConfig(image="any"), "run")
    engine = SlowEngine("unix:///nonexistent")
    starting = asyncio.create_task(host._start_container(engine))  # pyright: ignore[reportPrivateUsage]
    await asyncio.wait([starting])
    await engine.close()
    with connection, peer:
        assert connection.fileno() == -1

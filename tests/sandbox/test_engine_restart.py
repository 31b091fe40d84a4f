"""A Docker engine that is restarted under a running sandbox: one of the test's own, so that no other is disturbed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from bus.messages import CodeOk, CodeRequested, Output
from configs.schema import Sandbox as SandboxConfig
from sandbox.backend import ForkServerSandbox
from sandbox.contract import CodeResult, SandboxFailure
from sandbox.docker_backend import ContainerHost
from sandbox.docker_engine import DockerEngine
from sandbox.docker_probe import try_docker
from sandbox.image import image_name

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root may start an engine; `.ci/run` is root")
pytestmark = [pytest.mark.docker, pytest.mark.slow, needs_root]


class Engine:
    """A dockerd with a data root and a socket of its own, and the containerd that outlives it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.address = f"unix://{folder}/docker.sock"
        self._process: subprocess.Popen[bytes] | None = None
        self._containerd = self._run("containerd", root="containerd", state="state", address="containerd.sock")

    def _run(self, *command: str, **places: str) -> subprocess.Popen[bytes]:
        options = [f"--{name.replace('_', '-')}={self.folder}/{place}" for name, place in places.items()]
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen([*command, *options], stdout=log, stderr=log)

    def start(self) -> None:
        # In a network of its own: an engine without a bridge would remove the machine's.
        command = ("unshare", "--net", "dockerd", "--host", self.address, "--bridge", "none", "--iptables=false")
        places = {"data_root": "data", "exec_root": "exec", "pidfile": "pid", "containerd": "containerd.sock"}
        self._process = self._run(*command, **places)
        while try_docker({"DOCKER_HOST": self.address}).remedy:
            assert self._process.poll() is None, (self.folder / "log").read_text()[-3000:]
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.05)  # it says nowhere else that it is ready

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        assert self._process is not None
        self._process.send_signal(how)
        self._process.wait(60)

    def end(self) -> None:
        self.stop()
        self._containerd.terminate()
        self._containerd.wait(60)
        # An engine that was killed leaves its data root mounted over itself.
        subprocess.run(["umount", "--lazy", f"{self.folder}/data"], check=False, capture_output=True)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    with tempfile.TemporaryDirectory(prefix="asterism-engine-", ignore_cleanup_errors=True) as folder:
        image = Path(folder, "image.tar")
        subprocess.run(["docker", "save", "--output", str(image), image_name()], check=True)
        engine = Engine(Path(folder))
        engine.start()
        try:
            subprocess.run(["docker", "--host", engine.address, "load", "--quiet", "--input", str(image)], check=True)
            monkeypatch.setenv("DOCKER_HOST", engine.address)
            yield engine
        finally:
            engine.end()


def program(code: str, trajectory: int) -> CodeRequested:
    return CodeRequested(trajectory, 0, "python_code_with_standard_io", code, "")


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL], ids=["stopped", "killed"])
def test_calls_outlive_an_engine_that_is_restarted(engine: Engine, how: signal.Signals) -> None:
    async def whole() -> None:
        host = ContainerHost(SandboxConfig(), run="test")
        sandbox = ForkServerSandbox(host, SandboxConfig())
        await sandbox.start()
        try:
            calls = [sandbox.run(program("import time; time.sleep(0.5); print(1)", number)) for number in range(100)]
            under_way = asyncio.gather(*calls, return_exceptions=True)
            await sandbox.run(program("print(1)", 1000))
            await asyncio.to_thread(engine.stop, how)
            await asyncio.to_thread(engine.start)
            ends = await under_way
            assert all(isinstance(end, CodeResult | SandboxFailure) for end in ends), ends
            assert await asyncio.wait_for(answered(sandbox), 60) == CodeOk(Output("42\n"))
            (container,) = host.containers
            assert [owned.id for owned in await containers(engine)] == [container.id]
        finally:
            await sandbox.close()
        assert await containers(engine) == []

    asyncio.run(whole())


async def answered(sandbox: ForkServerSandbox) -> object:
    """The first outcome of a sandbox that is healing."""
    while True:
        with contextlib.suppress(SandboxFailure):
            return (await sandbox.run(program("print(6 * 7)", 99))).outcome


async def containers(engine: Engine) -> list[object]:
    client = DockerEngine(engine.address)
    try:
        return list(await client.owned())
    finally:
        await client.close()

"""A private Docker engine for tests that stop and kill it."""

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest

from asterism.sandbox.hosts.docker.docker_host import compute_image_name
from asterism.sandbox.hosts.docker.docker_probe import probe_docker

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root may start an engine; `.ci/run` is root")


class Engine:
    """A dockerd with a private data root and socket, and a containerd that outlives it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.address = f"unix://{folder}/docker.sock"
        self._process: subprocess.Popen[bytes] | None = None
        self._containerd = self._run("containerd", root="containerd", state="state", address="containerd.sock")

    def _run(self, *command: str, **paths: str) -> subprocess.Popen[bytes]:
        options = [f"--{name.replace('_', '-')}={self.folder}/{path}" for name, path in paths.items()]
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen([*command, *options], stdout=log, stderr=log)

    def start(self) -> None:
        # The new network namespace protects the machine's bridge, which an engine without a bridge removes.
        command = ("unshare", "--net", "dockerd", "--host", self.address, "--bridge", "none", "--iptables=false")
        paths = {"data_root": "data", "exec_root": "exec", "pidfile": "pid", "containerd": "containerd.sock"}
        self._process = self._run(*command, **paths)
        while probe_docker({"DOCKER_HOST": self.address}).remedy:
            assert self._process.poll() is None, (self.folder / "log").read_text()[-3000:]
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.05)  # only polling detects that the engine is ready

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        assert self._process is not None
        self._process.send_signal(how)
        self._process.wait(60)

    def end(self) -> None:
        self.stop()
        self._containerd.terminate()
        self._containerd.wait(60)
        # Each kill of the engine leaves another mount on its data root.
        while subprocess.run(["umount", "--lazy", f"{self.folder}/data"], capture_output=True).returncode == 0:
            pass


@contextlib.contextmanager
def own_engine() -> Generator[Engine]:
    with tempfile.TemporaryDirectory(prefix="asterism-engine-", ignore_cleanup_errors=True) as folder:
        image = Path(folder, "image.tar")
        subprocess.run(["docker", "save", "--output", str(image), compute_image_name()], check=True)
        engine = Engine(Path(folder))
        engine.start()
        try:
            subprocess.run(["docker", "--host", engine.address, "load", "--quiet", "--input", str(image)], check=True)
            yield engine
        finally:
            engine.end()

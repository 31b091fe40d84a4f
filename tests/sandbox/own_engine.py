"""A Docker engine of a test's own, which it may stop and kill: no other is disturbed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox.docker_probe import try_docker
from sandbox.image import image_name

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root may start an engine; `.ci/run` is root")


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
        # An engine that was killed leaves its data root mounted over itself, each time.
        while subprocess.run(["umount", "--lazy", f"{self.folder}/data"], capture_output=True).returncode == 0:
            pass


@contextlib.contextmanager
def own_engine() -> Iterator[Engine]:
    """It runs, and has the image."""
    with tempfile.TemporaryDirectory(prefix="asterism-engine-", ignore_cleanup_errors=True) as folder:
        image = Path(folder, "image.tar")
        subprocess.run(["docker", "save", "--output", str(image), image_name()], check=True)
        engine = Engine(Path(folder))
        engine.start()
        try:
            subprocess.run(["docker", "--host", engine.address, "load", "--quiet", "--input", str(image)], check=True)
            yield engine
        finally:
            engine.end()

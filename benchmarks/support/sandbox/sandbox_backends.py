"""Subjects of the sandbox benchmark: both backends, and a fresh interpreter for each call.

A backend has one fork server for each flavour, all on one core.
"""

import os
import subprocess
import sysconfig
import time
import venv
from pathlib import Path
from typing import Any

from asterism.configs.schema.machines import SandboxConfig as SandboxConfig
from asterism.sandbox.hosts.host import Host
from asterism.sandbox.hosts.local_host import LocalHost


def build_config(backend: str, core: int, **limits: Any) -> SandboxConfig:
    """Build a configuration with `core` as a container's cpuset. Local processes inherit the cores of this process."""
    return SandboxConfig(backend=backend, fork_servers=1, cpuset=str(core), **limits)  # pyright: ignore[reportArgumentType]


def create_host(backend: str, config: SandboxConfig) -> Host:
    if backend == "process":
        return LocalHost()
    from asterism.sandbox.hosts.docker.docker_host import ContainerHost  # needs the container client

    return ContainerHost(config, run="benchmark")


class ProcessPerCall:
    """`subprocess.run` for each call, in a virtual environment without the project's editable install.

    An editable install adds an import hook, which slows the start of an interpreter.
    """

    def __init__(self, folder: Path) -> None:
        venv.create(folder, symlinks=True)
        self._python = str(folder / "bin" / "python")
        self._environment = {
            "PATH": os.environ.get("PATH", ""),
            "PYTHONPATH": sysconfig.get_paths()["purelib"],
            "OPENBLAS_NUM_THREADS": "1",
        }

    def measure_seconds(self, code: str, printed: str, calls: int) -> float:
        """Return the seconds of `calls` sequential calls."""
        started = time.perf_counter()
        for _ in range(calls):
            done = subprocess.run(
                [self._python, "-c", code], env=self._environment, capture_output=True, check=True, text=True
            )
            assert done.stdout == printed, done
        return time.perf_counter() - started

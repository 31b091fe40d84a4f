"""The program of a run's processes pins the sandbox backend of executors, and keeps the exit code."""

import subprocess
import sys
from pathlib import Path

import pytest

from asterism.actors.process import pin_backend, record_isolation
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.machines import SandboxConfig
from asterism.sandbox.contract import Isolation

AUTO = SandboxConfig(backend="auto")

ABANDONED_COLLECTIVE = """
import asyncio
from datetime import timedelta

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from asterism.actors.process import exit_process
from asterism.engine.sglang.weights.collective_thread import CollectiveThread


async def main():
    ours = CollectiveThread("x", "gloo", "127.0.0.1", 2, 600.0)
    joining = ours.join()

    def join():
        store = TCPStore("127.0.0.1", ours.port, 2, timeout=timedelta(seconds=60))
        for prefix in ("x", "x/", "cpu/"):
            store = PrefixStore(prefix, store)
        return ProcessGroupGloo(store, 1, 2, timedelta(seconds=60))

    other = await asyncio.to_thread(join)
    await joining
    ours.broadcast([torch.zeros(1_000_000)])
    ours.close()
    return other


other = asyncio.run(main())
print("printed", end="")
exit_process(3)
"""


@pytest.mark.slow
def test_a_collective_without_a_peer_does_not_change_the_exit_code() -> None:
    done = subprocess.run([sys.executable, "-c", ABANDONED_COLLECTIVE], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (3, "printed", "")


@pytest.fixture
def isolation_path(tmp_path: Path) -> Path:
    path = RunFolder(tmp_path).get_isolation_path("executor-0@1")
    record_isolation(path, Isolation("docker", ("pid",), True, (), 4))
    return path


def test_a_restarted_executor_gets_the_backend_that_auto_chose_first(isolation_path: Path) -> None:
    assert pin_backend(AUTO, isolation_path, 2).backend == "docker"
    assert pin_backend(SandboxConfig(backend="process"), isolation_path, 2).backend == "process"


def test_auto_chooses_again_in_a_new_launch(isolation_path: Path) -> None:
    assert pin_backend(AUTO, isolation_path, 1).backend == "auto"
    assert pin_backend(AUTO, isolation_path, 2).backend == "auto"  # the first incarnation recorded no choice

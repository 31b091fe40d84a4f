"""A real SGLang server process: start, attach and shutdown.

test_run_faults.py and test_ranks.py cover the death of one of its processes.
"""

import asyncio
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from msgspec.structs import replace

from asterism.bus.process.scratch_lock import name_scratch, remove_stale_scratch
from asterism.engine.sglang.client import SGLangClient
from asterism.engine.sglang.http_api import SUPPORTED_VERSIONS, GenerateRequest, SamplingParams
from asterism.engine.sglang.server.external_server import ExternalServer
from asterism.engine.sglang.server.managed_server import SGLangServer
from asterism.engine.sglang.server.server_arguments import HOST
from tests.processes import wait_for_end
from tests.sglang.environment import ROOT
from tests.sglang.runs import find_shared_memory, is_shared_memory_left
from tests.sglang.serving import make_requirements

pytestmark = [pytest.mark.slow, pytest.mark.sglang, pytest.mark.timeout(1800)]

PORT, ORPHAN_PORT = 31_000, 31_020

ORPHAN = """
import asyncio, sys
from pathlib import Path
from asterism.bus.process.scratch_lock import holding_scratch
from asterism.engine.sglang.server.managed_server import SGLangServer
from tests.sglang.serving import make_requirements
async def main():
    model, log, scratch = map(Path, sys.argv[1:4])
    with holding_scratch(scratch):
        server = SGLangServer(make_requirements(model, int(sys.argv[4])), log=log, scratch=scratch / "sglang-0")
        await server.start()
        print("ready", *server.list_processes(), flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""


class Started(NamedTuple):
    server: SGLangServer
    log: Path
    scratch: Path


@pytest.fixture(scope="module")
def started(loop: asyncio.Runner, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    folder = tmp_path_factory.mktemp("server")
    log, scratch = folder / "sglang-0.log", folder / "scratch"
    server = SGLangServer(make_requirements(model, PORT), log=log, scratch=scratch, version=7)
    assert loop.run(server.start()) == f"http://{HOST}:{PORT}" == server.url
    yield Started(server, log, scratch)
    loop.run(server.close())


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((HOST, port)) != 0


async def generate_token(server: ExternalServer) -> list[int]:
    sampling = SamplingParams(max_new_tokens=1, ignore_eos=True)
    async with SGLangClient(server.url) as client:
        return (await client.generate(GenerateRequest("1;", [1, 2, 3], sampling, return_logprob=True))).output_ids


async def test_a_server_matches_its_configuration(started: Started):
    info = started.server.info
    assert info.version in SUPPORTED_VERSIONS
    assert (info.max_total_num_tokens, info.page_size, info.dp_size, info.tp_size) == (8192, 16, 1, 1)
    assert info.enable_deterministic_inference
    assert info.enable_priority_scheduling
    assert not info.disable_radix_cache
    async with SGLangClient(started.server.url) as client:
        assert (await client.get_model_info()).weight_version == "7"
    assert "The server is fired up" in started.log.read_text()


async def test_an_external_server_keeps_running_after_close(started: Started):
    attached = attach(started)
    assert await attached.start() == started.server.url
    assert attached.info == started.server.info
    await attached.close()
    assert len(await generate_token(attached)) == 1


async def test_weights_from_a_folder_that_is_removed_later_count_as_the_same_model(started: Started, tmp_path: Path):
    folder = tmp_path / "weights"
    shutil.copytree(started.server.info.model_path, folder)
    async with SGLangClient(started.server.url) as client:
        await client.update_from_disk(folder, "7")
    shutil.rmtree(folder)
    attached = attach(started)
    assert await attached.start() == started.server.url
    await attached.close()


def attach(started: Started) -> ExternalServer:
    requirements = make_requirements(Path(started.server.info.model_path), PORT)
    external = replace(requirements.sglang, external_urls=(started.server.url,))
    return ExternalServer(requirements._replace(sglang=external))


def test_closing_leaves_no_process_and_no_file(started: Started, loop: asyncio.Runner):
    watched = [os.pidfd_open(pid) for pid in started.server.list_processes()]
    assert len(watched) >= 3
    memory = set(find_shared_memory([*started.server.list_processes()]))
    assert is_shared_memory_left(memory)
    loop.run(started.server.close())
    for pidfd in watched:
        wait_for_end(pidfd)
    assert started.server.death.cancelled()
    assert is_free(PORT)
    assert not started.scratch.exists()
    assert not is_shared_memory_left(memory)


def test_a_server_dies_with_its_parent_and_the_next_start_removes_its_files(model: Path, tmp_path: Path):
    scratch = Path("/tmp") / name_scratch(f"orphan-{os.getpid()}")
    arguments = (str(model), str(tmp_path / "sglang-0.log"), str(scratch), str(ORPHAN_PORT))
    parent = subprocess.Popen(
        [sys.executable, "-c", ORPHAN, *arguments], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with parent:
        assert parent.stdout is not None
        message, *pids = next(line for line in parent.stdout if line.startswith("ready")).split()
        watched = [os.pidfd_open(int(pid)) for pid in pids]
        assert (message, len(watched) >= 3) == ("ready", True)
        shared = set(find_shared_memory([int(pid) for pid in pids]))
        assert is_shared_memory_left(shared)
        parent.kill()
    for pidfd in watched:
        wait_for_end(pidfd)
    assert is_free(ORPHAN_PORT)
    remove_stale_scratch()
    assert not scratch.exists()
    assert not is_shared_memory_left(shared)

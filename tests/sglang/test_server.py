"""A real SGLang server process: start, attach, death and shutdown."""

from __future__ import annotations

import asyncio
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from msgspec.structs import replace

from engine.sglang.client import SGLangClient
from engine.sglang.http_api import SUPPORTED_VERSIONS, GenerateRequest, SamplingParams
from engine.sglang.server.compatibility import ServerUnusable
from engine.sglang.server.external_server import ExternalServer
from engine.sglang.server.managed_server import SGLangServer
from engine.sglang.server.server_arguments import HOST
from tests.sglang.environment import ROOT
from tests.sglang.serving import SEQUENCE_TOKENS, make_requirements, save_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.sglang, pytest.mark.timeout(1800)]

PORT, KILLED_PORT, ORPHAN_PORT = 31_000, 31_010, 31_020
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8]

ORPHAN = """
import asyncio, sys
from pathlib import Path
from engine.sglang.server.managed_server import SGLangServer
from tests.sglang.serving import make_requirements
async def main():
    model, folder = Path(sys.argv[1]), Path(sys.argv[2])
    server = SGLangServer(make_requirements(model, int(sys.argv[3])), log=folder / "sglang-0.log", scratch=folder / "scratch")
    await server.start()
    print("ready", *server.list_processes(), flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


class Started(NamedTuple):
    loop: asyncio.Runner
    server: SGLangServer
    log: Path
    scratch: Path


@pytest.fixture(scope="module")
def started(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    folder = tmp_path_factory.mktemp("server")
    log, scratch = folder / "sglang-0.log", folder / "scratch"
    server = SGLangServer(make_requirements(model, PORT), log=log, scratch=scratch, version=7)
    with asyncio.Runner() as loop:
        assert loop.run(server.start()) == f"http://{HOST}:{PORT}" == server.url
        yield Started(loop, server, log, scratch)
        loop.run(server.close())


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((HOST, port)) != 0


def wait_for_end(pidfd: int) -> None:
    select.select([pidfd], [], [])
    os.close(pidfd)


async def tokens(url: str, seed: int, num: int = 24, prompt: list[int] = PROMPT) -> list[int]:
    client = SGLangClient(url)
    try:
        sampling = SamplingParams(max_new_tokens=num, sampling_seed=seed, ignore_eos=True)
        request = GenerateRequest(
            rid=f"{seed}", input_ids=prompt, sampling_params=sampling, return_logprob=True, logprob_start_len=-1
        )
        return (await client.generate(request)).output_ids
    finally:
        await client.close()


def test_a_server_matches_its_configuration(started: Started):
    info = started.server.info
    assert info.version in SUPPORTED_VERSIONS
    assert (info.max_total_num_tokens, info.page_size, info.dp_size, info.tp_size) == (8192, 16, 1, 1)
    assert info.enable_deterministic_inference
    assert info.enable_priority_scheduling
    assert not info.disable_radix_cache


def test_the_servers_output_is_in_its_log_file(started: Started):
    assert "The server is fired up" in started.log.read_text()


def test_the_weights_have_the_configured_version(started: Started):
    async def scenario() -> str:
        client = SGLangClient(started.server.url)
        try:
            return (await client.get_model_info()).weight_version
        finally:
            await client.close()

    assert started.loop.run(scenario()) == "7"


def test_a_paused_server_responds_but_is_not_ready(started: Started):
    async def scenario() -> tuple[bool, bool, bool]:
        client = SGLangClient(started.server.url)
        try:
            await client.pause("in_place")
            paused = await client.is_ready(), await client.is_responsive()
            await client.resume()
            return *paused, await client.is_ready()
        finally:
            await client.close()

    assert started.loop.run(scenario()) == (False, True, True)


def test_the_longest_sequence_fits_to_its_last_token(started: Started):
    prompt = [5] * (SEQUENCE_TOKENS - 1)
    assert len(started.loop.run(tokens(started.server.url, 0, 1, prompt))) == 1


def test_equal_seeds_give_equal_tokens_and_different_seeds_different_tokens(started: Started):
    async def scenario() -> list[list[int]]:
        return [await tokens(started.server.url, seed) for seed in (3, 4, 5, 3)]

    first, *others, again = started.loop.run(scenario())
    assert again == first
    assert len({tuple(drawn) for drawn in (first, *others)}) == 3


class TestAttached:
    def attach(self, started: Started, **changes: object) -> ExternalServer:
        requirements = make_requirements(Path(started.server.info.model_path), PORT)
        sglang = replace(requirements.sglang, external_urls=(started.server.url,))
        changed = requirements._replace(sglang=sglang)._replace(**changes)  # pyright: ignore[reportArgumentType]
        return ExternalServer(changed)

    def refusal(self, started: Started, **changes: object) -> str:
        with pytest.raises(ServerUnusable) as caught:
            started.loop.run(self.attach(started, **changes).start())
        return str(caught.value)

    def test_an_external_server_keeps_running_after_close(self, started: Started):
        attached = self.attach(started)
        assert started.loop.run(attached.start()) == started.server.url
        assert attached.info == started.server.info
        started.loop.run(attached.close())
        assert len(started.loop.run(tokens(started.server.url, 1))) == 24

    def test_a_different_model_is_refused(self, started: Started, tmp_path: Path):
        message = self.refusal(started, model=save_tiny_model(tmp_path, num_layers=3))
        assert message.startswith(f"model.checkpoint = {tmp_path}")
        assert f"sglang.external_urls[0] = {started.server.url} has a different model" in message

    def test_a_model_of_the_same_shape_is_accepted(self, started: Started, tmp_path: Path):
        attached = self.attach(started, model=save_tiny_model(tmp_path, seed=1))
        assert started.loop.run(attached.start()) == started.server.url
        started.loop.run(attached.close())

    def test_weights_from_a_removed_folder_count_as_the_same_model(self, started: Started, tmp_path: Path):
        async def updated() -> None:
            client = SGLangClient(started.server.url)
            await client.weights.update_from_disk(folder, "7")
            await client.close()

        folder = tmp_path / "weights"
        shutil.copytree(started.server.info.model_path, folder)
        started.loop.run(updated())
        shutil.rmtree(folder)
        attached = self.attach(started)
        assert started.loop.run(attached.start()) == started.server.url
        started.loop.run(attached.close())

    def test_insufficient_capacity_is_refused_with_the_required_values(self, started: Started):
        message = self.refusal(
            started, sequence_tokens=300, engine=replace(make_requirements(Path()).engine, kv_tokens=9000)
        )
        assert "dialogue.prompt_tokens + response_tokens = 300: " in message
        assert "(its --context-length is 200; 308 is enough)" in message
        assert "engine.kv_tokens = 9000: " in message


def test_closing_leaves_no_process_and_no_file(started: Started):
    watched = [os.pidfd_open(pid) for pid in started.server.list_processes()]
    assert len(watched) >= 3
    memory = set(Path("/dev/shm").glob("sglang_*"))
    started.loop.run(started.server.close())
    for pidfd in watched:
        wait_for_end(pidfd)
    assert started.server.death.cancelled()
    assert is_free(PORT)
    assert not started.scratch.exists()
    assert set(Path("/dev/shm").glob("sglang_*")) < memory


@pytest.mark.parametrize("victim", ["sglang::scheduler", "python"])
def test_the_death_of_one_process_is_the_servers_death(victim: str, model: Path, tmp_path: Path):
    async def scenario() -> tuple[str, str]:
        requirements = make_requirements(model, KILLED_PORT)
        server = SGLangServer(requirements, log=tmp_path / "sglang-1.log", scratch=tmp_path / "scratch")
        url = await server.start()
        attaching = requirements._replace(sglang=replace(requirements.sglang, external_urls=(url,)))
        attached = ExternalServer(attaching, probe_interval_s=0.05)
        try:
            await attached.start()
            processes = server.list_processes()
            watched = [os.pidfd_open(pid) for pid in processes]
            os.kill(next(pid for pid, name in processes.items() if victim in name), signal.SIGKILL)
            cause, external_cause = await server.death, await attached.death
            await asyncio.to_thread(lambda: [wait_for_end(pidfd) for pidfd in watched])
            return cause, external_cause
        finally:
            await attached.close()
            await server.close()

    cause, external_cause = asyncio.run(scenario())
    assert cause.startswith("the SGLang server sglang-1 ")
    assert str(tmp_path / "sglang-1.log") in cause
    assert external_cause == f"sglang.external_urls[0] = http://{HOST}:{KILLED_PORT} no longer responds"
    assert is_free(KILLED_PORT)


def test_a_server_dies_with_the_process_that_started_it(model: Path, tmp_path: Path):
    arguments = (str(model), str(tmp_path), str(ORPHAN_PORT))
    parent = subprocess.Popen(
        [sys.executable, "-c", ORPHAN, *arguments], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with parent:
        assert parent.stdout is not None
        message, *pids = next(line for line in parent.stdout if line.startswith("ready")).split()
        watched = [os.pidfd_open(int(pid)) for pid in pids]
        assert (message, len(watched) >= 3) == ("ready", True)
        parent.kill()
    for pidfd in watched:
        wait_for_end(pidfd)
    assert is_free(ORPHAN_PORT)

"""A real SGLang server as a process of ours: started, attached to, killed, ended."""

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

from engine.sglang.attached import AttachedServer
from engine.sglang.client import SGLangClient
from engine.sglang.command import HOST
from engine.sglang.fit import ServerUnusable
from engine.sglang.protocol import SUPPORTED, GenerateRequest, SamplingParams
from engine.sglang.server import SGLangServer
from tests.sglang.environment import ROOT
from tests.sglang.serving import SEQUENCE_TOKENS, tiny_model, wanted

pytestmark = [pytest.mark.slow, pytest.mark.sglang, pytest.mark.timeout(1800)]

PORT, KILLED_PORT, ORPHAN_PORT = 31_000, 31_010, 31_020
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8]

ORPHAN = """
import asyncio, sys
from pathlib import Path
from engine.sglang.server import SGLangServer
from tests.sglang.serving import wanted
async def main():
    model, folder = Path(sys.argv[1]), Path(sys.argv[2])
    server = SGLangServer(wanted(model, int(sys.argv[3])), log=folder / "sglang-0.log", scratch=folder / "scratch")
    await server.start()
    print("ready", *server.processes(), flush=True)
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
    server = SGLangServer(wanted(model, PORT), log=log, scratch=scratch, version=7)
    with asyncio.Runner() as loop:
        assert loop.run(server.start()) == f"http://{HOST}:{PORT}" == server.url
        yield Started(loop, server, log, scratch)
        loop.run(server.close())


def is_free(port: int) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex((HOST, port)) != 0


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


def test_a_server_is_as_the_configuration_wants_it(started: Started):
    info = started.server.info
    assert info.version in SUPPORTED
    assert (info.max_total_num_tokens, info.page_size, info.dp_size, info.tp_size) == (8192, 16, 1, 1)
    assert info.enable_deterministic_inference
    assert info.enable_priority_scheduling
    assert not info.disable_radix_cache


def test_what_it_prints_is_in_its_log_file(started: Started):
    assert "The server is fired up" in started.log.read_text()


def test_the_version_of_its_weights_is_the_one_that_was_said(started: Started):
    async def scenario() -> str:
        client = SGLangClient(started.server.url)
        try:
            return (await client.model_info()).weight_version
        finally:
            await client.close()

    assert started.loop.run(scenario()) == "7"


def test_one_that_is_paused_answers_though_it_is_not_ready(started: Started):
    async def scenario() -> tuple[bool, bool, bool]:
        client = SGLangClient(started.server.url)
        try:
            await client.pause("in_place")
            paused = await client.ready(), await client.answers()
            await client.resume()
            return *paused, await client.ready()
        finally:
            await client.close()

    assert started.loop.run(scenario()) == (False, True, True)


def test_the_longest_sequence_fits_to_its_last_token(started: Started):
    prompt = [5] * (SEQUENCE_TOKENS - 1)
    assert len(started.loop.run(tokens(started.server.url, 0, 1, prompt))) == 1


def test_equal_seeds_give_equal_tokens_and_different_ones_others(started: Started):
    async def scenario() -> list[list[int]]:
        return [await tokens(started.server.url, seed) for seed in (3, 4, 5, 3)]

    first, *others, again = started.loop.run(scenario())
    assert again == first
    assert len({tuple(drawn) for drawn in (first, *others)}) == 3


class TestAttached:
    def attach(self, started: Started, **changes: object) -> AttachedServer:
        given = wanted(Path(started.server.info.model_path), PORT)
        sglang = replace(given.sglang, attach=(started.server.url,))
        return AttachedServer(given._replace(sglang=sglang)._replace(**changes))  # pyright: ignore[reportArgumentType]

    def refusal(self, started: Started, **changes: object) -> str:
        with pytest.raises(ServerUnusable) as caught:
            started.loop.run(self.attach(started, **changes).start())
        return str(caught.value)

    def test_a_server_that_is_attached_to_goes_on_when_that_ends(self, started: Started):
        attached = self.attach(started)
        assert started.loop.run(attached.start()) == started.server.url
        assert attached.info == started.server.info
        started.loop.run(attached.close())
        assert len(started.loop.run(tokens(started.server.url, 1))) == 24

    def test_another_model_is_refused(self, started: Started, tmp_path: Path):
        said = self.refusal(started, model=tiny_model(tmp_path, num_layers=3))
        assert said.startswith(f"model.checkpoint = {tmp_path}")
        assert f"sglang.attach[0] = {started.server.url} has another model" in said

    def test_a_model_of_the_same_shape_will_do_since_the_weights_come_later(self, started: Started, tmp_path: Path):
        attached = self.attach(started, model=tiny_model(tmp_path, seed=1))
        assert started.loop.run(attached.start()) == started.server.url
        started.loop.run(attached.close())

    def test_weights_from_a_folder_that_is_gone_are_no_other_model(self, started: Started, tmp_path: Path):
        async def updated() -> None:
            client = SGLangClient(started.server.url)
            await client.update_from_disk(folder, "7", flush_cache=True)
            await client.close()

        folder = tmp_path / "weights"
        shutil.copytree(started.server.info.model_path, folder)
        started.loop.run(updated())
        shutil.rmtree(folder)
        attached = self.attach(started)
        assert started.loop.run(attached.start()) == started.server.url
        started.loop.run(attached.close())

    def test_too_little_room_is_refused_with_what_is_needed(self, started: Started):
        said = self.refusal(started, sequence_tokens=300, engine=replace(wanted(Path()).engine, kv_tokens=9000))
        assert "dialogue.prompt_tokens + response_tokens = 300: " in said
        assert "(its --context-length is 200, 308 is enough)" in said
        assert "engine.kv_tokens = 9000: " in said


def test_when_it_is_closed_nothing_of_it_is_left(started: Started):
    watched = [os.pidfd_open(pid) for pid in started.server.processes()]
    assert len(watched) >= 3
    memory = set(Path("/dev/shm").glob("sglang_*"))
    started.loop.run(started.server.close())
    for pidfd in watched:
        wait_for_end(pidfd)
    assert started.server.died.cancelled()
    assert is_free(PORT)
    assert not started.scratch.exists()
    assert set(Path("/dev/shm").glob("sglang_*")) < memory


@pytest.mark.parametrize("victim", ["sglang::scheduler", "python"])
def test_it_is_dead_as_soon_as_one_of_its_processes_is(victim: str, model: Path, tmp_path: Path):
    async def scenario() -> tuple[str, str]:
        given = wanted(model, KILLED_PORT)
        server = SGLangServer(given, log=tmp_path / "sglang-1.log", scratch=tmp_path / "scratch")
        url = await server.start()
        attaching = given._replace(sglang=replace(given.sglang, attach=(url,)))
        attached = AttachedServer(attaching, ask_every_s=0.05)
        try:
            await attached.start()
            processes = server.processes()
            watched = [os.pidfd_open(pid) for pid in processes]
            os.kill(next(pid for pid, name in processes.items() if victim in name), signal.SIGKILL)
            why, why_attached = await server.died, await attached.died
            await asyncio.to_thread(lambda: [wait_for_end(pidfd) for pidfd in watched])
            return why, why_attached
        finally:
            await attached.close()
            await server.close()

    why, why_attached = asyncio.run(scenario())
    assert why.startswith("the SGLang server sglang-1 ")
    assert str(tmp_path / "sglang-1.log") in why
    assert why_attached == f"sglang.attach[0] = http://{HOST}:{KILLED_PORT} does not answer any more"
    assert is_free(KILLED_PORT)


def test_it_dies_with_the_process_that_started_it(model: Path, tmp_path: Path):
    arguments = (str(model), str(tmp_path), str(ORPHAN_PORT))
    parent = subprocess.Popen(
        [sys.executable, "-c", ORPHAN, *arguments], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with parent:
        assert parent.stdout is not None
        said, *pids = next(line for line in parent.stdout if line.startswith("ready")).split()
        watched = [os.pidfd_open(int(pid)) for pid in pids]
        assert (said, len(watched) >= 3) == ("ready", True)
        parent.kill()
    for pidfd in watched:
        wait_for_end(pidfd)
    assert is_free(ORPHAN_PORT)

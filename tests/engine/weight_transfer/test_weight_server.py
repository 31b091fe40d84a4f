"""Tests in which the processes of a weight server and a download are killed, stopped and restarted."""

import asyncio
import json
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

from asterism.bus.messages import WeightsPublished
from asterism.bus.process.heartbeat import Heartbeat, receiving_heartbeats
from asterism.bus.transport.curve_auth import generate_key, load_key
from asterism.configs.load import write_resolved
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.run_config import RunConfig
from asterism.engine.weight_transfer.shared_memory import load_published
from asterism.engine.weight_transfer.weight_client import WeightsFetcher
from tests.bus.networks import wait_until
from tests.engine.weight_transfer.slow_link import LOOPBACK, link_to
from tests.engine.whole_publisher import WholePublisher

pytestmark = [pytest.mark.slow, pytest.mark.real_clock, pytest.mark.timeout(60)]
CHUNK = 64 * 2**10
NUMBERS = 1_000_000
HALF = 2 * NUMBERS


def fetch_in_process(folder: Path, port: int, key: Path, published: WeightsPublished) -> None:
    asyncio.run(WeightsFetcher(folder, LOOPBACK, port, load_key(key), CHUNK).fetch(published))


class Scene:
    def __init__(self, path: Path) -> None:
        self.folder = RunFolder(path / "run")
        self.near = path / "near"
        for needed in (self.folder.path, self.folder.sockets, self.folder.shared_memory):
            needed.mkdir(parents=True)
        write_resolved(RunConfig(name="weights"), self.folder.config)
        self.key = generate_key(path / "keys")
        self.publisher = WholePublisher(self.folder.shared_memory)

    def publish(self, version: int) -> WeightsPublished:
        return self.publisher.publish(version, {"a": torch.full((NUMBERS,), float(version))})

    def fetcher(self, port: int) -> WeightsFetcher:
        return WeightsFetcher(self.near, LOOPBACK, port, load_key(self.key), CHUNK)

    def read_log_entries(self, event: str) -> list[dict[str, int]]:
        log = self.folder.logs / "weights.jsonl"
        lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        return [line for line in lines if line["event"] == event]

    @asynccontextmanager
    async def server(self, port: int = 0, life: int = 1) -> AsyncIterator[tuple[asyncio.subprocess.Process, int]]:
        """Start the server; yield its process and port."""
        before = len(self.read_log_entries("weight_server.started"))
        flags = ("--host", LOOPBACK, "--port", str(port), "--key", str(self.key), "--incarnation", str(life))
        argv = ("-m", "asterism.engine.weight_transfer.weight_server", "--run-folder", str(self.folder.path), *flags)
        process = await asyncio.create_subprocess_exec(sys.executable, *argv)
        try:
            await wait_until(
                lambda: len(self.read_log_entries("weight_server.started")) > before or process.returncode is not None
            )
            yield process, self.read_log_entries("weight_server.started")[-1]["port"]
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path)
    yield made
    for scratch in (made.folder.sockets, made.folder.shared_memory):
        shutil.rmtree(scratch)


def assert_loads(published: WeightsPublished) -> None:
    target = {"a": torch.zeros(NUMBERS)}
    load_published(published, target, torch.float32)
    assert torch.all(target["a"] == published.version)


async def test_the_server_sends_heartbeats_and_weights_and_exits_at_sigterm(scene: Scene) -> None:
    beats = asyncio.Queue[Heartbeat]()
    with receiving_heartbeats(scene.folder.sockets, beats.put_nowait):
        async with scene.server(life=3) as (process, port):
            beat = await beats.get()
            assert (beat.process, beat.incarnation) == ("weights", 3)
            assert_loads(await scene.fetcher(port).fetch(scene.publish(1)))
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0
    assert scene.read_log_entries("weights.served")[-1]["bytes"] == 4 * NUMBERS


async def test_a_download_resumes_after_the_server_restarts(scene: Scene) -> None:
    published = scene.publish(1)
    async with scene.server() as (process, port), link_to(port, allowed=HALF) as link:
        fetching = asyncio.create_task(scene.fetcher(link.port).fetch(published))
        await link.held.wait()
        process.kill()
        await process.wait()
        link.release()
        await wait_until(lambda: link.connections > 2)  # the server is down now
        assert not fetching.done()
        async with scene.server(port, life=2) as (again, _):
            assert_loads(await fetching)
            again.send_signal(signal.SIGTERM)
            assert await again.wait() == 0
        assert scene.read_log_entries("weights.served")[-1]["bytes"] <= HALF + 4 * CHUNK


async def test_a_process_killed_during_a_download_leaves_no_invalid_slot(scene: Scene) -> None:
    published = scene.publish(1)
    async with scene.server() as (_, port), link_to(port, allowed=HALF) as link:
        arguments = (scene.near, link.port, scene.key, published)
        process = get_context("fork").Process(target=fetch_in_process, args=arguments, daemon=True)
        process.start()
        await wait_until(lambda: link.held.is_set() or not process.is_alive())
        assert link.held.is_set(), f"the download ended with {process.exitcode}"
        waiting = asyncio.create_task(scene.fetcher(port).fetch(published))
        process.kill()
        process.join()
        assert_loads(await waiting)
    assert sorted(path.name for path in scene.near.iterdir()) == ["slot_1", "slot_1.lock"]

"""Tests of weight transfer to another node: weights from the learner's slots are fetched once and completely."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import structlog
import torch
import zmq
from torch import Tensor

from asterism.bus.messages import WeightsPublished
from asterism.bus.transport.curve_auth import ClusterKey, generate_key, load_key, secure_client_socket
from asterism.configs.errors import UnusableInput
from asterism.engine.contract import WeightsRefused
from asterism.engine.weight_transfer.shared_memory import load_published
from asterism.engine.weight_transfer.slot_file import WINDOW_CHUNKS, ChunkRequest, encode_request
from asterism.engine.weight_transfer.weight_client import WeightsFetcher
from asterism.engine.weight_transfer.weight_layout import get_layout
from asterism.engine.weight_transfer.weight_server import WeightServer
from tests.bus.networks import wait_until
from tests.engine.closeness import assert_close
from tests.engine.weight_transfer.served_weights import serving
from tests.engine.weight_transfer.slow_link import LOOPBACK, link_to
from tests.engine.whole_publisher import WholePublisher

pytestmark = [pytest.mark.real_clock, pytest.mark.timeout(60)]
CHUNK = 64 * 2**10
NUMBERS = 150_001  # number of 4-byte values, which need more than 9 chunks
SIZE = get_layout({"a": torch.empty(NUMBERS)}, torch.float32).num_bytes
HALF = SIZE // 2


def weights(seed: int) -> dict[str, Tensor]:
    return {"a": torch.rand(NUMBERS, generator=torch.Generator().manual_seed(seed))}


def assert_loads(published: WeightsPublished, seed: int) -> None:
    target = {"a": torch.zeros(NUMBERS)}
    load_published(published, target, torch.float32)
    assert_close(target, weights(seed), rtol=0, atol=0)


def content_of(published: WeightsPublished) -> bytes:
    return Path(published.path).read_bytes()


class Scene:
    """The node of the learner with a weight server, and another node."""

    def __init__(self, folder: Path) -> None:
        self.far, self.near = folder / "far", folder / "near"
        self.publisher = WholePublisher(self.far)
        self.key = new_key(folder / "keys")
        self.server = WeightServer(self.far, LOOPBACK, 0, self.key)

    def fetcher(self, port: int | None = None, chunk_bytes: int = CHUNK) -> WeightsFetcher:
        return WeightsFetcher(self.near, LOOPBACK, port or self.server.port, self.key, chunk_bytes)

    def publish(self, version: int, seed: int | None = None) -> WeightsPublished:
        return self.publisher.publish(version, weights(version if seed is None else seed))

    def slots(self) -> list[str]:
        """List the files on the other node, without locks."""
        return sorted(path.name for path in self.near.glob("*") if path.suffix != ".lock")


def new_key(folder: Path) -> ClusterKey:
    return load_key(generate_key(folder))


@pytest.fixture
@asynccontextmanager
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    each = Scene(tmp_path)
    async with serving(each.server):
        yield each


async def test_fetched_weights_are_loaded_like_local_weights(scene: Scene) -> None:
    published = scene.publish(4)
    near = await scene.fetcher().fetch(published)
    assert Path(near.path).parent == scene.near
    assert (near.version, near.num_bytes, near.digest) == (4, SIZE, published.digest)
    assert content_of(near) == content_of(published)
    assert_loads(near, 4)


async def test_each_fetched_version_replaces_the_overwritten_version(scene: Scene) -> None:
    for version in range(4):
        assert_loads(await scene.fetcher().fetch(scene.publish(version)), version)
    assert scene.slots() == ["slot_0", "slot_1"]
    assert scene.server.counts.bytes == 4 * SIZE


async def test_the_processes_of_a_node_fetch_a_version_once(scene: Scene) -> None:
    published = scene.publish(4)
    near = await asyncio.gather(*(scene.fetcher().fetch(published) for _ in range(3)))
    assert await scene.fetcher().fetch(published) == near[0] == near[1] == near[2]
    assert_loads(near[0], 4)
    assert scene.server.counts.bytes == SIZE


async def test_a_version_republished_with_other_weights_is_fetched_again(scene: Scene) -> None:
    """A restarted learner can publish the same version with other bytes."""
    await scene.fetcher().fetch(scene.publish(4, seed=1))
    assert_loads(await scene.fetcher().fetch(scene.publish(4, seed=2)), 2)


@pytest.mark.parametrize(("version", "seed"), [(6, 6), (4, 5)], ids=["a later version", "the same version again"])
async def test_weights_overwritten_during_a_download_leave_no_files(scene: Scene, version: int, seed: int) -> None:
    async with link_to(scene.server.port, allowed=HALF) as link:
        fetching = asyncio.create_task(scene.fetcher(link.port).fetch(scene.publish(4)))
        await link.held.wait()
        later = scene.publish(version, seed)
        link.release()
        with pytest.raises(WeightsRefused, match="weights of version 4"):
            await fetching
    assert scene.slots() == []
    assert_loads(await scene.fetcher().fetch(later), seed)


async def test_missing_weights_are_refused(scene: Scene) -> None:
    for path in (scene.far / "slot_0", scene.far / "elsewhere"):
        with pytest.raises(WeightsRefused):
            await scene.fetcher().fetch(WeightsPublished(4, str(path), SIZE, "00" * 16))
    assert scene.slots() == []


@pytest.mark.slow
async def test_a_broken_link_is_reconnected_without_requesting_chunks_twice(scene: Scene) -> None:
    async with link_to(scene.server.port, allowed=HALF) as link:
        with structlog.testing.capture_logs() as logged:
            fetching = asyncio.create_task(scene.fetcher(link.port).fetch(scene.publish(4)))
            await link.held.wait()
            link.cut()
            link.release()
            assert_loads(await fetching, 4)
        assert link.connections == 2
    assert (
        scene.server.counts.bytes < SIZE + HALF + WINDOW_CHUNKS * CHUNK
    )  # less than if all chunks had been requested again
    (line,) = [line for line in logged if line["event"] == "weights.interrupted"]
    assert HALF - WINDOW_CHUNKS * CHUNK < line["done_bytes"] <= HALF
    assert (line["version"], line["cause"]) == (4, "disconnected")


@pytest.mark.slow
async def test_chunks_become_smaller_if_the_link_breaks_within_each_of_them(scene: Scene) -> None:
    async with link_to(scene.server.port, cut_after=3 * CHUNK) as link:
        near = await scene.fetcher(link.port, chunk_bytes=4 * CHUNK).fetch(scene.publish(4))
        assert_loads(near, 4)
        assert link.connections > SIZE // (3 * CHUNK)


@pytest.mark.slow
async def test_a_silent_server_is_retried_over_another_connection(scene: Scene) -> None:
    async with link_to(scene.server.port, allowed=0) as link:
        fetcher = WeightsFetcher(scene.near, LOOPBACK, link.port, scene.key, answer_timeout_s=0.2)
        fetching = asyncio.create_task(fetcher.fetch(scene.publish(4)))
        await wait_until(lambda: link.connections == 2)
        link.release()
        assert_loads(await fetching, 4)


@pytest.mark.slow
async def test_a_cancelled_download_ends_and_another_download_completes(scene: Scene) -> None:
    published = scene.publish(4)
    async with link_to(scene.server.port, allowed=HALF) as link:
        first = asyncio.create_task(scene.fetcher(link.port).fetch(published))
        await link.held.wait()
        second = asyncio.create_task(scene.fetcher(link.port).fetch(published))  # waits for the first one
        third = asyncio.create_task(scene.fetcher().fetch(published))
        await wait_until(lambda: (scene.near / "slot_0.part").exists())
        for fetching in (first, second):
            fetching.cancel()
            with pytest.raises(asyncio.CancelledError):
                await fetching
        assert_loads(await third, 4)
    assert scene.slots() == ["slot_0"]


async def test_leftovers_of_a_killed_process_are_not_loaded(scene: Scene) -> None:
    """A temporary file lacks the header and the slot's name. A slot of the wrong size is incomplete."""
    published = scene.publish(4)
    whole = content_of(published)
    scene.near.mkdir()
    (scene.near / "slot_0.part").write_bytes(whole)
    (scene.near / "slot_0").write_bytes(whole[:-1])
    assert_loads(await scene.fetcher().fetch(published), 4)
    assert scene.slots() == ["slot_0"]
    assert scene.server.counts.bytes == SIZE


@pytest.mark.slow
async def test_a_client_without_the_key_receives_nothing_and_is_counted(scene: Scene, tmp_path: Path) -> None:
    published = scene.publish(4)
    stranger = WeightsFetcher(scene.near, LOOPBACK, scene.server.port, new_key(tmp_path / "others"))
    fetching = asyncio.create_task(stranger.fetch(published))
    await wait_until(lambda: scene.server.counts.refused > 1)
    fetching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetching
    assert (scene.server.counts.chunks, scene.server.counts.malformed, scene.slots()) == (0, 0, [])
    assert_loads(await scene.fetcher().fetch(published), 4)


# ---------------------------------------------------------------- requests to the server


@asynccontextmanager
async def asking(scene: Scene) -> AsyncIterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, 1)
        secure_client_socket(socket, scene.key)
        socket.connect(f"tcp://{LOOPBACK}:{scene.server.port}")
        yield socket


async def test_a_malformed_request_is_counted_and_the_next_request_is_answered(scene: Scene) -> None:
    digest = scene.publish(4).digest
    nonsense = (ChunkRequest(0, 4, digest, *place) for place in ((-1, 4), (0, 0), (0, 2**23), (2**63, 4)))
    async with asking(scene) as socket:
        for question in (b"", b"\xc1", *map(encode_request, nonsense)):
            socket.send(question)
        socket.send_multipart([b"", b""])
        await wait_until(lambda: scene.server.counts.malformed == 7)
        absent = encode_request(ChunkRequest(0, 4, digest, SIZE - 4, 8))
        socket.send(absent)
        await wait_until(lambda: bool(socket.poll(0)))
        assert socket.recv_multipart() == [absent]
        last = encode_request(ChunkRequest(0, 4, digest, SIZE - 4, 4))
        socket.send(last)
        await wait_until(lambda: bool(socket.poll(0)))
        assert socket.recv_multipart() == [last, bytes(4)]  # the padding after the last parameter


@pytest.mark.slow
async def test_a_node_that_reads_no_answers_does_not_stall_other_nodes(scene: Scene) -> None:
    published = scene.publish(4)
    async with asking(scene) as socket:
        question = encode_request(ChunkRequest(0, 4, published.digest, 0, SIZE))
        for _ in range(100):
            socket.send(question)
        await wait_until(lambda: scene.server.counts.unanswered > 50)
        assert_loads(await scene.fetcher().fetch(published), 4)


async def test_a_port_in_use_is_reported(scene: Scene) -> None:
    with pytest.raises(UnusableInput, match=f"127.0.0.1:{scene.server.port}: Address already in use"):
        WeightServer(scene.far, LOOPBACK, scene.server.port, scene.key)

"""Tests of the transport that uses a folder, which the servers of a node share."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from asterism.bus.messages import WeightsPublished
from asterism.engine.contract import WeightsRefused
from asterism.engine.sglang.weights import build_extra_key, disk_transport
from tests.engine.sglang.fake_server import silent
from tests.engine.sglang.weights.fake_weight_server import UPDATES, FakeWeightServer
from tests.engine.sglang.weights.update_scenes import Make, assert_all_loaded, connected, update

pytestmark = [pytest.mark.real_clock, pytest.mark.slow]


async def test_an_unwritable_folder_is_reported_before_any_pause(
    make: Make, server: FakeWeightServer, tmp_path: Path, weights: WeightsPublished
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(WeightsRefused, match=r"cannot be written to .*file/for_server"):
        await update(make("disk", folder=tmp_path / "file"), server, weights)
    assert server.paths == []


async def test_the_folder_is_removed_after_successful_and_refused_updates(
    make: Make, tmp_path: Path, weights: WeightsPublished
) -> None:
    await update(make("disk"), FakeWeightServer(), weights)
    assert list_folders(tmp_path) == []
    server = FakeWeightServer()
    server.refusals[UPDATES["disk"]] = "no"
    with pytest.raises(WeightsRefused):
        await update(make("disk"), server, weights)
    assert list_folders(tmp_path) == []


def list_folders(tmp_path: Path) -> list[str]:
    return [path.name for path in (tmp_path / "for_server").iterdir() if path.is_dir()]


async def test_the_servers_of_a_node_load_the_same_folder(
    make: Make, tmp_path: Path, weights: WeightsPublished, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers, written = [FakeWeightServer() for _ in range(4)], list[Path]()

    def write(folder: Path, *rest: Any) -> None:
        written.append(folder)
        write_files(folder, *rest)

    write_files = disk_transport._write_files  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(disk_transport, "_write_files", write)
    loading, loaded = asyncio.Barrier(len(servers)), list[str]()

    def wait_for_all(server: FakeWeightServer) -> None:
        load = server.handlers[UPDATES["disk"]]

        async def handle(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            await loading.wait()
            loaded.append(body["model_path"])
            return await load(request, body)

        server.handlers[UPDATES["disk"]] = handle

    for server in servers:
        wait_for_all(server)
    await asyncio.gather(*(update(make("disk"), server, weights) for server in servers))
    for server in servers:
        assert_all_loaded(server)
    assert (len(written), len(set(loaded))) == (1, 1)
    assert list_folders(tmp_path) == []


async def test_a_cancelled_update_leaves_no_folder(
    make: Make, server: FakeWeightServer, tmp_path: Path, weights: WeightsPublished
) -> None:
    loading = asyncio.Event()

    async def hang(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        loading.set()
        return await silent(request, body)

    server.handlers[UPDATES["disk"]] = hang
    transport = make("disk")
    async with connected(server, transport) as client:
        updating = asyncio.ensure_future(transport.update(client, weights))
        await loading.wait()
        assert list_folders(tmp_path) == [build_extra_key(weights)]
        updating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await updating
    assert list_folders(tmp_path) == []

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from aiohttp import web
from msgspec.structs import replace
from structlog.testing import capture_logs

from bus.messages import WeightsPublished
from engine.contract import EngineFailure, WeightsRefused
from engine.sglang.client import SGLangClient
from engine.sglang.http_api import UpdateRefused
from engine.sglang.weights import WeightTransport, build_extra_key, disk_transport, ipc_transport, tensor_handles
from engine.sglang.weights.checksums import ChecksumRegistry
from engine.sglang.weights.disk_transport import DiskTransport
from engine.sglang.weights.ipc_transport import IpcTransport
from engine.sglang.weights.transports import ProcessGroupTransport, TensorTransport, split_into_buckets
from engine.weight_transfer.shared_memory import open_published
from engine.weight_transfer.weight_layout import load_layout
from tests.engine.closeness import assert_close
from tests.engine.sglang.fake_server import refusing, silent
from tests.engine.sglang.weights.fake_weight_server import UPDATES, FakeWeightServer, UpdateError
from tests.engine.tiny_models import save_small_model, small_config, small_model
from tests.engine.whole_publisher import WholePublisher

pytestmark = [pytest.mark.real_clock, pytest.mark.slow]
SMALL_BUCKET = 8 * 2**10  # several for the small model
TRANSPORTS = tuple(UPDATES)
PAUSE, RESUME = "/pause_generation", "/continue_generation"
BEGIN, END = "/begin_weight_update", "/end_weight_update"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_model(tmp_path_factory.mktemp("checkpoint"), small_model())


@pytest.fixture
def server() -> FakeWeightServer:
    return FakeWeightServer()


@pytest.fixture
def weights(tmp_path: Path) -> WeightsPublished:
    return publish(tmp_path, torch.float32)


def publish(folder: Path, dtype: torch.dtype) -> WeightsPublished:
    return WholePublisher(folder, dtype).publish(7, dict(small_model(seed=7).named_parameters()))


def assert_all_loaded(server: FakeWeightServer, dtype: torch.dtype = torch.float32) -> None:
    published = dict(small_model(seed=7).named_parameters())
    assert {tensor.dtype for tensor in server.loaded.values()} == {dtype}
    loaded = {name: tensor.float() for name, tensor in server.loaded.items()}
    assert_close(loaded, {name: tensor.to(dtype).float() for name, tensor in published.items()}, rtol=0, atol=0)
    assert server.weight_version == "7"


Make = Callable[..., WeightTransport]


@pytest.fixture
def make(checkpoint: Path, tmp_path: Path) -> Make:
    def make_transport(
        name: str,
        dtype: torch.dtype = torch.float32,
        folder: Path = tmp_path,
        bucket: int = SMALL_BUCKET,
        timeout_s: float = 20.0,
        device: str = "cpu",
    ) -> WeightTransport:
        layout, checksums = load_layout(checkpoint, dtype), ChecksumRegistry(tmp_path / "checksums", "sglang-0")
        match name:
            case "disk":
                return DiskTransport(layout, checksums, folder / "for_server")
            case "tensor":
                return TensorTransport(layout, checksums, bucket)
            case "ipc":
                return IpcTransport(layout, checksums, bucket, torch.device(device))
            case _:
                return ProcessGroupTransport(layout, checksums, bucket, timeout_s=timeout_s, response_timeout_s=0.1)

    return make_transport


@asynccontextmanager
async def connected(server: FakeWeightServer, transport: WeightTransport) -> AsyncGenerator[SGLangClient]:
    async with server.serving() as url, SGLangClient(url) as client:
        try:
            yield client
        finally:
            await transport.close()
            server.groups.clear()  # ends pending collectives


async def update(transport: WeightTransport, server: FakeWeightServer, *versions: WeightsPublished) -> None:
    async with connected(server, transport) as client:
        for version in versions:
            await transport.update(client, version)


async def assert_update_breaks(
    transport: WeightTransport, server: FakeWeightServer, weights: WeightsPublished, message: str
) -> None:
    """The engine must restart its server: requests stay paused."""
    with pytest.raises(EngineFailure, match=message) as failure:
        await update(transport, server, weights)
    assert not isinstance(failure.value, WeightsRefused)
    assert RESUME not in server.paths


# ---------------------------------------------------------------- every transport


@pytest.mark.parametrize(("dtype", "has_paused_requests"), [(torch.float32, False), (torch.bfloat16, True)])
@pytest.mark.parametrize("name", TRANSPORTS)
async def test_a_server_receives_all_parameters_in_its_dtype_while_its_requests_are_paused(
    make: Make,
    server: FakeWeightServer,
    tmp_path: Path,
    name: str,
    dtype: torch.dtype,
    has_paused_requests: bool,
) -> None:
    if has_paused_requests:
        server.handlers["/flush_cache"] = refusing(400, "Timed out waiting for idle state.")
    await update(make(name, dtype), server, publish(tmp_path, dtype))
    assert_all_loaded(server, dtype)
    during = [path for path in server.paths if path != "/init_weights_update_group"]
    assert during[0] == PAUSE
    assert during[-2:] == ["/flush_cache", RESUME]
    assert UPDATES[name] in during[1:-2]


@pytest.mark.parametrize("name", TRANSPORTS)
async def test_after_a_refused_update_requests_resume_and_the_next_update_succeeds(
    make: Make, server: FakeWeightServer, weights: WeightsPublished, name: str
) -> None:
    transport = make(name)
    server.refusals[UPDATES[name]] = "weight splits are active"
    async with connected(server, transport) as client:
        with pytest.raises(WeightsRefused, match=r"version 7: .*weight splits are active"):
            await transport.update(client, weights)
        assert server.paths.index(RESUME) > server.paths.index(UPDATES[name])
        assert server.paths.count(BEGIN) == server.paths.count(END)
        await transport.update(client, weights)
    assert_all_loaded(server)


@pytest.mark.parametrize(
    ("name", "message"),
    [("disk", "Failed to update weights: x.\nRolling back to original weights."), ("group", "x. partially updated.")],
)
async def test_a_server_with_partially_written_weights_is_not_resumed(
    make: Make, server: FakeWeightServer, weights: WeightsPublished, name: str, message: str
) -> None:
    server.refusals[UPDATES[name]] = message
    await assert_update_breaks(make(name), server, weights, "partially loaded")


@pytest.mark.parametrize("name", TRANSPORTS)
async def test_a_server_with_another_version_than_sent_fails(
    make: Make, server: FakeWeightServer, weights: WeightsPublished, name: str
) -> None:
    server.handlers["/model_info"] = refusing(200, {"model_path": "/model", "weight_version": "6"})
    await assert_update_breaks(make(name), server, weights, "reports version 6 after an update to 7")


@pytest.mark.parametrize("name", TRANSPORTS)
async def test_with_a_wrong_checksum_requests_stay_paused(make: Make, weights: WeightsPublished, name: str) -> None:
    server = FakeWeightServer()

    async def change_weight(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        server.loaded["model.layers.0.self_attn.k_proj.weight"][-1, -1] += 1.0
        return await server.compute_checksum(request, body)

    for _ in range(2):
        await update(make(name), FakeWeightServer(), weights)
    server.handlers["/weights_checker"] = change_weight
    await assert_update_breaks(make(name), server, weights, "the same version 7 but hold different weights")


@pytest.mark.parametrize("name", TRANSPORTS)
async def test_unreadable_weights_are_refused_before_any_pause(
    make: Make, server: FakeWeightServer, weights: WeightsPublished, name: str
) -> None:
    with pytest.raises(WeightsRefused, match="holds other weights of version 7, or is damaged"):
        await update(make(name), server, replace(weights, digest="00" * 16))
    assert server.paths == []


async def test_an_unwritable_folder_is_named_before_any_pause(
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


async def test_servers_of_one_node_load_one_folder(
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


# ---------------------------------------------------------------- in buckets


@pytest.mark.parametrize("name", ["tensor", "group", "ipc"])
async def test_an_update_left_open_is_closed_first(
    make: Make, server: FakeWeightServer, weights: WeightsPublished, name: str
) -> None:
    transport = make(name)
    async with connected(server, transport) as client:
        await client.begin_update()
        await transport.update(client, weights)
    assert_all_loaded(server)
    assert [path for path in server.paths if path in (BEGIN, END)] == [BEGIN, BEGIN, END, BEGIN, END]


@pytest.mark.parametrize("name", ["tensor", "group", "ipc"])
async def test_after_a_refused_second_bucket_requests_stay_paused(
    make: Make, server: FakeWeightServer, weights: WeightsPublished, name: str
) -> None:
    path = UPDATES[name]
    load = server.handlers[path]

    async def refuse_second(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if server.paths.count(path) > 1:
            server.refusals[path] = "out of memory"
        return await load(request, body)

    server.handlers[path] = refuse_second
    await assert_update_breaks(make(name), server, weights, r"partially loaded: .*out of memory")
    assert server.weight_version == "default"


@pytest.mark.parametrize("name", TRANSPORTS)
async def test_an_update_to_a_server_without_a_published_parameter_fails(
    make: Make, weights: WeightsPublished, name: str
) -> None:
    server = FakeWeightServer()
    server.info["quantization"] = None
    await assert_update_breaks(make(name), server, weights, r"sglang-0 lacks model\.")


@pytest.mark.parametrize("name", ["tensor", "ipc"])
async def test_each_tensor_parallel_rank_gets_a_payload(make: Make, weights: WeightsPublished, name: str) -> None:
    server = FakeWeightServer(tp_size=2)
    await update(make(name), server, weights)
    assert_all_loaded(server)


async def test_handles_take_the_place_of_values_in_request_bodies(make: Make, weights: WeightsPublished) -> None:
    sizes: list[int] = []
    for name in ("tensor", "ipc"):
        server = FakeWeightServer()
        await update(make(name, bucket=1 << 30), server, weights)
        (body,) = server.get_bodies(UPDATES[name])
        sizes.append(len(body["serialized_named_tensors"][0]))
    assert sizes[0] > weights.num_bytes > sizes[1]


async def test_a_part_for_which_memory_is_missing_is_refused(
    make: Make, server: FakeWeightServer, weights: WeightsPublished, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: object) -> bytes:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(ipc_transport, "pickle_handles", refuse)
    with pytest.raises(WeightsRefused, match="cannot be shared: CUDA error: out of memory"):
        await update(make("ipc"), server, weights)
    assert server.paths[-2:] == [END, RESUME]


async def test_an_error_of_the_clean_up_is_logged_and_does_not_hide_the_error_of_the_update(
    make: Make, server: FakeWeightServer, weights: WeightsPublished, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> dict[str, torch.Tensor]:
        raise UpdateRefused("a part of the weights cannot be copied to cuda:1")

    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(ipc_transport, "_stage", refuse)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.cuda, "ipc_collect", fail)
    with capture_logs() as logged, pytest.raises(WeightsRefused, match="cannot be copied to cuda:1"):
        await update(make("ipc", device="cuda:1"), server, weights)
    assert server.paths[-2:] == [END, RESUME]
    (line,) = (line for line in logged if line["event"] == "weights.buckets_not_freed")
    assert (line["device"], line["cause"]) == ("cuda:1", "CUDA error: an illegal memory access was encountered")


def test_a_gpu_is_named_by_its_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    def reduce(tensor: SimpleNamespace) -> tuple[Callable[..., None], tuple[object, ...]]:
        return rebuild, ("cls", "size", "stride", 0, "storage", "dtype", tensor.device.index, b"handle", "rest")

    def rebuild() -> None:
        raise AssertionError("the server calls this function")

    def get_properties(device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(uuid=f"GPU-{device.index}")

    monkeypatch.setattr(tensor_handles.reductions, "reduce_tensor", reduce)
    monkeypatch.setattr(torch.cuda, "get_device_properties", get_properties)
    tensor: Any = SimpleNamespace(device=torch.device("cuda", 3))
    _, arguments = tensor_handles._reduce_tensor(tensor)  # pyright: ignore[reportPrivateUsage]
    assert arguments == ("cls", "size", "stride", 0, "storage", "dtype", "GPU-3", b"handle", "rest")


def test_buckets_hold_all_parameters_in_order_within_the_size_limit() -> None:
    parameters = {name: torch.zeros(size) for name, size in (("a", 2), ("b", 3), ("c", 9), ("d", 1), ("e", 4))}
    assert [list(bucket) for bucket in split_into_buckets(parameters, 20)] == [["a", "b"], ["c"], ["d", "e"]]


def test_tied_embeddings_are_published_once_and_untied_ones_with_their_head(tmp_path: Path) -> None:
    for tied in (True, False):
        model = small_model(config=small_config(tie_word_embeddings=tied))
        folder = save_small_model(tmp_path, model)
        published = WholePublisher(tmp_path / f"{tied}").publish(1, dict(model.named_parameters()))
        with open_published(published, load_layout(folder, torch.float32)) as views:
            assert ("lm_head.weight" in views) is not tied


def test_weights_with_the_same_version_but_another_digest_have_another_cache_key(weights: WeightsPublished) -> None:
    others = (replace(weights, version=8), replace(weights, digest="ab" * 16))
    assert len({build_extra_key(version) for version in (weights, *others)}) == 3


# ---------------------------------------------------------------- the group


async def test_a_group_is_created_once_and_reused(
    make: Make, server: FakeWeightServer, weights: WeightsPublished
) -> None:
    await update(make("group"), server, weights, weights)
    assert server.paths.count("/init_weights_update_group") == 1


async def test_a_server_that_leaves_during_a_broadcast_ends_it(
    make: Make, server: FakeWeightServer, weights: WeightsPublished
) -> None:
    receive = server.handlers[UPDATES["group"]]

    async def leave_first(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        server.groups.clear()
        return await receive(request, body)

    server.handlers[UPDATES["group"]] = leave_first
    with pytest.raises(WeightsRefused, match="Failed to receive weights"):
        await update(make("group"), server, weights)
    assert server.paths[-2:] == [RESUME, "/destroy_weights_update_group"]


async def test_a_refused_group_is_not_kept(make: Make, server: FakeWeightServer, weights: WeightsPublished) -> None:
    transport = make("group", timeout_s=0.5)
    server.refusals["/init_weights_update_group"] = "Failed to initialize custom process group: no route"
    with pytest.raises(WeightsRefused, match=r"could not create a process group with the server: .*no route"):
        await update(transport, server, weights)
    assert isinstance(transport, ProcessGroupTransport)
    assert transport.group is None
    assert PAUSE not in server.paths


@pytest.mark.slow
async def test_an_unresponsive_server_fails_the_broadcast(
    make: Make, server: FakeWeightServer, weights: WeightsPublished
) -> None:
    server.handlers[UPDATES["group"]] = silent
    transport = make("group", bucket=1 << 30, timeout_s=0.5)
    message = r"the server does not respond; local error: .*([Tt]imed out|timeout)"
    await assert_update_breaks(transport, server, weights, message)


async def test_cancelling_an_update_ends_the_servers_broadcast(
    make: Make, server: FakeWeightServer, weights: WeightsPublished
) -> None:
    transport = make("group")
    receiving = asyncio.Queue[asyncio.Future[list[torch.Tensor]]]()

    async def receive_more(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        """Waits for more tensors than the engine sends."""
        shapes = [(shape, torch.float32) for shape in (*body["shapes"], [1])]
        receiving.put_nowait(asyncio.ensure_future(server.receive(shapes, body["group_name"])))
        return await silent(request, body)

    server.handlers[UPDATES["group"]] = receive_more
    async with connected(server, transport) as client:
        updating = asyncio.ensure_future(transport.update(client, weights))
        broadcast = await receiving.get()
        updating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await updating
        with pytest.raises(UpdateError):
            await broadcast

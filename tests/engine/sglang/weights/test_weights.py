from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from msgspec.structs import replace

from bus.messages import WeightsPublished
from configs.errors import UnusableInput
from engine.contract import EngineFailure, WeightsRefused
from engine.model.hf_checkpoint import save_model
from engine.sglang.client import SGLangClient
from engine.sglang.http_api import RankChecksums, ServerInfo
from engine.sglang.weights import WeightTransport, build_extra_key
from engine.sglang.weights.buckets import PublishedLayout, split_into_buckets
from engine.sglang.weights.checksums import ChecksumRegistry
from engine.sglang.weights.from_disk import DiskTransport
from engine.sglang.weights.from_distributed import ProcessGroupTransport
from engine.sglang.weights.from_tensor import TensorTransport
from engine.weight_transfer.shared_memory import WeightsPublisher
from tests.engine.closeness import assert_close
from tests.engine.sglang.weights.fake_weight_server import FakeWeightServer
from tests.engine.tiny_models import small_config, small_model, write_tokenizer

SMALL_BUCKET = 8 * 2**10  # several for the small model
TRANSPORTS = ("disk", "tensor", "group")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    write_tokenizer(folder / "tokenizer")
    save_model(folder / "model", small_config(), small_model().state_dict(), folder / "tokenizer")
    return folder / "model"


@pytest.fixture
def weights(tmp_path: Path) -> WeightsPublished:
    return WeightsPublisher(tmp_path).publish(7, dict(small_model(seed=7).named_parameters()))


def assert_all_loaded(server: FakeWeightServer, dtype: torch.dtype = torch.float32) -> None:
    published = dict(small_model(seed=7).named_parameters())
    assert {tensor.dtype for tensor in server.loaded.values()} == {dtype}
    loaded = {name: tensor.float() for name, tensor in server.loaded.items()}
    assert_close(loaded, {name: tensor.to(dtype).float() for name, tensor in published.items()}, rtol=0, atol=0)
    assert server.version == "7"


def make_transport(name: str, checkpoint: Path, folder: Path, dtype: torch.dtype = torch.float32) -> WeightTransport:
    layout, checksums = PublishedLayout(checkpoint, dtype), ChecksumRegistry(folder / "checksums", "sglang-0")
    match name:
        case "disk":
            return DiskTransport(layout, checksums, folder / "for_server")
        case "tensor":
            return TensorTransport(layout, checksums, SMALL_BUCKET)
        case _:
            return ProcessGroupTransport(layout, checksums, SMALL_BUCKET, timeout_s=20.0, response_timeout_s=0.1)


Make = Callable[..., WeightTransport]


@pytest.fixture
def make(checkpoint: Path, tmp_path: Path) -> Make:
    return lambda name, dtype=torch.float32: make_transport(name, checkpoint, tmp_path, dtype)


def update(transport: WeightTransport, server: FakeWeightServer, *versions: WeightsPublished) -> None:
    async def run() -> None:
        for version in versions:
            await transport.update(cast(SGLangClient, server), version)
        await transport.close()

    try:
        asyncio.run(run())
    finally:
        server.leave()  # ends pending collectives


# ---------------------------------------------------------------- every transport


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", TRANSPORTS)
def test_a_server_receives_all_parameters_in_its_dtype_and_their_version(
    make: Make, weights: WeightsPublished, name: str, dtype: torch.dtype
) -> None:
    server = FakeWeightServer()
    update(make(name, dtype), server, weights)
    assert_all_loaded(server, dtype)


@pytest.mark.parametrize("name", TRANSPORTS)
def test_requests_stay_paused_from_before_the_update_until_the_cache_is_flushed(
    make: Make, weights: WeightsPublished, name: str
) -> None:
    server = FakeWeightServer()
    update(make(name), server, weights)
    during = [call for call in server.calls if call != "init"]
    assert during[0] == "pause in_place"
    assert during[-2:] == ["flush", "resume"]
    assert name in during[1:-2]


@pytest.mark.parametrize("name", TRANSPORTS)
def test_with_paused_requests_the_cache_is_not_flushed(make: Make, weights: WeightsPublished, name: str) -> None:
    server = FakeWeightServer()
    server.has_paused_requests = True
    update(make(name), server, weights)
    assert server.version == "7"
    assert server.calls[-1] == "resume"


@pytest.mark.parametrize("name", TRANSPORTS)
def test_an_immediately_refused_update_resumes_requests(make: Make, weights: WeightsPublished, name: str) -> None:
    server = FakeWeightServer()
    server.refused[name] = ["weight splits are active"]
    with pytest.raises(WeightsRefused, match=r"version 7: .*weight splits are active"):
        update(make(name), server, weights)
    assert server.calls.index("resume") > server.calls.index(name)
    assert server.calls.count("begin") == server.calls.count("end")


@pytest.mark.parametrize("name", TRANSPORTS)
def test_an_update_after_a_refused_one_succeeds(make: Make, weights: WeightsPublished, name: str) -> None:
    server, transport = FakeWeightServer(), make(name)
    server.refused[name] = ["weight splits are active"]

    async def run() -> None:
        with pytest.raises(WeightsRefused):
            await transport.update(cast(SGLangClient, server), weights)
        await transport.update(cast(SGLangClient, server), weights)
        await transport.close()

    asyncio.run(run())
    assert_all_loaded(server)


@pytest.mark.parametrize(
    ("name", "message"),
    [("disk", "Failed to update weights: x.\nRolling back to original weights."), ("group", "x. partially updated.")],
)
def test_a_server_with_partially_written_weights_is_not_resumed(
    make: Make, weights: WeightsPublished, name: str, message: str
) -> None:
    server = FakeWeightServer()
    server.refused[name] = [message]
    with pytest.raises(EngineFailure, match="partially loaded") as failure:
        update(make(name), server, weights)
    assert not isinstance(failure.value, WeightsRefused)
    assert "resume" not in server.calls


@pytest.mark.parametrize("name", TRANSPORTS)
def test_a_server_that_reports_another_version_after_an_update_fails(
    make: Make, weights: WeightsPublished, name: str
) -> None:
    class Forgetful(FakeWeightServer):
        async def flush_cache(self) -> bool:
            self.version = "6"
            return True

    with pytest.raises(EngineFailure, match="reports version 6 after an update to 7") as failure:
        update(make(name), Forgetful(), weights)
    assert not isinstance(failure.value, WeightsRefused)


@pytest.mark.parametrize("name", TRANSPORTS)
def test_a_checksum_mismatch_fails_and_requests_stay_paused(make: Make, weights: WeightsPublished, name: str) -> None:
    class Careless(FakeWeightServer):
        async def compute_checksums(self) -> list[RankChecksums]:
            self.loaded["model.layers.0.self_attn.k_proj.weight"][-1, -1] += 1.0
            return await super().compute_checksums()

    update(make(name), FakeWeightServer(), weights)
    update(make(name), FakeWeightServer(), weights)
    server = Careless()
    with pytest.raises(EngineFailure, match="the same version 7 but hold different weights") as failure:
        update(make(name), server, weights)
    assert not isinstance(failure.value, WeightsRefused)
    assert "resume" not in server.calls


@pytest.mark.parametrize("name", TRANSPORTS)
def test_unreadable_weights_are_refused_before_requests_are_paused(
    make: Make, weights: WeightsPublished, name: str
) -> None:
    server = FakeWeightServer()
    with pytest.raises(WeightsRefused, match="overwritten or are damaged"):
        update(make(name), server, replace(weights, digest="00" * 16))
    assert server.calls == []


def test_an_unwritable_folder_is_named_and_requests_are_not_paused(
    checkpoint: Path, tmp_path: Path, weights: WeightsPublished
) -> None:
    server = FakeWeightServer()
    (tmp_path / "file").touch()
    transport = make_transport("disk", checkpoint, tmp_path / "file")
    with pytest.raises(WeightsRefused, match=r"cannot be written to .*file/for_server"):
        update(transport, server, weights)
    assert server.calls == []


def test_the_folder_is_removed_after_successful_and_refused_updates(
    make: Make, tmp_path: Path, weights: WeightsPublished
) -> None:
    update(make("disk"), FakeWeightServer(), weights)
    assert not (tmp_path / "for_server").exists()
    server = FakeWeightServer()
    server.refused["disk"] = ["no"]
    with pytest.raises(WeightsRefused):
        update(make("disk"), server, weights)
    assert not (tmp_path / "for_server").exists()


# ---------------------------------------------------------------- in buckets


@pytest.mark.parametrize("name", ["tensor", "group"])
def test_an_update_left_open_is_closed_first(make: Make, weights: WeightsPublished, name: str) -> None:
    server = FakeWeightServer()
    asyncio.run(server.begin_update())
    update(make(name), server, weights)
    assert server.version == "7"
    assert server.calls.count("begin") == server.calls.count("end") == 2


@pytest.mark.parametrize("name", ["tensor", "group"])
def test_a_refusal_after_the_first_bucket_leaves_requests_paused(
    make: Make, weights: WeightsPublished, name: str
) -> None:
    class FullAfterOne(FakeWeightServer):
        def _record(self, call: str) -> None:
            if call == name and name in self.calls:
                self.refused[name] = ["out of memory"]
            super()._record(call)

    server = FullAfterOne()
    with pytest.raises(EngineFailure, match=r"partially loaded: .*out of memory") as failure:
        update(make(name), server, weights)
    assert not isinstance(failure.value, WeightsRefused)
    assert "resume" not in server.calls
    assert server.version == "default"


@pytest.mark.parametrize("name", ["tensor", "group"])
def test_several_replicas_are_refused_with_the_keys_to_change(make: Make, weights: WeightsPublished, name: str) -> None:
    server = FakeWeightServer(dp_size=2)
    message = f'sglang.weights = "{name}" does not work with sglang.data_parallel = 2'
    with pytest.raises(UnusableInput, match=message):
        make(name).check(asyncio.run(server.get_server_info()))
    with pytest.raises(UnusableInput, match=message):
        update(make(name), server, weights)
    assert server.calls == []


def test_the_disk_transport_supports_replicas(make: Make, weights: WeightsPublished) -> None:
    server = FakeWeightServer(dp_size=2)
    update(make("disk"), server, weights)
    assert server.version == "7"


def test_each_tensor_parallel_rank_gets_a_payload(make: Make, weights: WeightsPublished) -> None:
    server = FakeWeightServer(tp_size=2)
    update(make("tensor"), server, weights)
    assert_all_loaded(server)


def test_buckets_hold_all_parameters_in_order_within_the_size_limit() -> None:
    parameters = {name: torch.zeros(size) for name, size in (("a", 2), ("b", 3), ("c", 9), ("d", 1), ("e", 4))}
    assert [list(bucket) for bucket in split_into_buckets(parameters, 20)] == [["a", "b"], ["c"], ["d", "e"]]


def test_tied_embeddings_are_published_once_and_untied_ones_with_their_head(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer")
    for tied in (True, False):
        model = small_model(config=small_config(tie_word_embeddings=tied))
        save_model(tmp_path / "model", model.config, model.state_dict(), tmp_path / "tokenizer")
        published = WeightsPublisher(tmp_path / f"{tied}").publish(1, dict(model.named_parameters()))
        names = PublishedLayout(tmp_path / "model", torch.float32).read(published).keys()
        assert ("lm_head.weight" in names) is not tied


def test_weights_with_the_same_version_but_another_digest_have_another_cache_key(
    weights: WeightsPublished,
) -> None:
    others = (replace(weights, version=8), replace(weights, digest="ab" * 16))
    assert len({build_extra_key(version) for version in (weights, *others)}) == 3


# ---------------------------------------------------------------- the group


def test_a_group_is_created_once_and_reused(make: Make, weights: WeightsPublished) -> None:
    server = FakeWeightServer()
    update(make("group"), server, weights, weights)
    assert server.calls.count("init") == 1


def test_the_update_after_a_lost_group_creates_a_new_group(make: Make, weights: WeightsPublished) -> None:
    server, transport = FakeWeightServer(), make("group")

    async def run() -> None:
        await transport.update(cast(SGLangClient, server), weights)
        server.leave()
        with pytest.raises(WeightsRefused, match=r"Failed to receive weights: Group .* not in \[\]"):
            await transport.update(cast(SGLangClient, server), weights)
        assert server.calls[-2:] == ["resume", "destroy"]
        await transport.update(cast(SGLangClient, server), weights)
        await transport.close()

    asyncio.run(run())
    assert server.calls.count("init") == 2
    assert_all_loaded(server)


def test_a_server_that_leaves_during_a_broadcast_ends_the_broadcast(make: Make, weights: WeightsPublished) -> None:
    server = FakeWeightServer()
    server.leaves_during_broadcast = True
    with pytest.raises(WeightsRefused, match="Failed to receive weights"):
        update(make("group"), server, weights)


def test_a_refused_group_is_not_kept(checkpoint: Path, tmp_path: Path, weights: WeightsPublished) -> None:
    server = FakeWeightServer()
    server.refused["init"] = ["Failed to initialize custom process group: no route"]
    layout = PublishedLayout(checkpoint, torch.float32)
    transport = ProcessGroupTransport(layout, ChecksumRegistry(tmp_path, "sglang-0"), SMALL_BUCKET, timeout_s=0.5)
    with pytest.raises(WeightsRefused, match=r"could not create a process group with the server: .*no route"):
        update(transport, server, weights)
    assert transport.group_name is None
    assert "pause in_place" not in server.calls


@pytest.mark.slow
def test_an_unresponsive_server_fails_the_broadcast(
    checkpoint: Path, tmp_path: Path, weights: WeightsPublished
) -> None:
    server = FakeWeightServer()
    server.stays_silent = True
    layout = PublishedLayout(checkpoint, torch.float32)
    transport = ProcessGroupTransport(
        layout, ChecksumRegistry(tmp_path, "sglang-0"), 1 << 30, timeout_s=0.5, response_timeout_s=0.1
    )
    with pytest.raises(
        EngineFailure, match=r"the server does not respond; local error: .*([Tt]imed out|timeout)"
    ) as failure:
        update(transport, server, weights)
    assert not isinstance(failure.value, WeightsRefused)
    assert "resume" not in server.calls


def test_cancelling_an_update_ends_the_servers_broadcast(make: Make, weights: WeightsPublished) -> None:
    class Waiting(FakeWeightServer):
        """Waits for more tensors than the engine sends."""

        async def update_from_group(self, names: Any, dtypes: Any, shapes: Any, *_: Any, **__: Any) -> None:
            more = [torch.empty(shape) for shape in (*shapes, [1])]
            self.receiving = asyncio.ensure_future(asyncio.to_thread(self._receive, more, self.groups.popitem()[1]))
            self.waits.set()
            await asyncio.shield(self.receiving)

    async def run() -> None:
        server, transport = Waiting(), make("group")
        server.waits = asyncio.Event()
        updating = asyncio.ensure_future(transport.update(cast(SGLangClient, server), weights))
        await server.waits.wait()
        updating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await updating
        with pytest.raises(RuntimeError):
            await server.receiving

    asyncio.run(run())


def test_every_transport_accepts_a_server_with_one_replica(make: Make) -> None:
    server = ServerInfo("0.5.23", "/model", 1, 1, 1, 1, 1, 2, "cpu", False, False, False, False)
    for name in TRANSPORTS:
        make(name).check(server)

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
from engine.checkpoint import save_model
from engine.contract import EngineFailure, WeightsRefused
from engine.sglang.client import SGLangClient
from engine.sglang.protocol import RankChecksums, ServerInfo
from engine.sglang.weights import WeightsWay, extra_key
from engine.sglang.weights.checksums import Checksums
from engine.sglang.weights.disk import DiskWeights
from engine.sglang.weights.group import GroupWeights
from engine.sglang.weights.published import PublishedLayout, buckets
from engine.sglang.weights.tensor import TensorWeights
from engine.weights import WeightsPublisher
from tests.engine.closeness import assert_close
from tests.engine.sglang.weight_servers import WeightServer
from tests.engine.tiny_models import small_config, small_model, write_tokenizer

SMALL_BUCKET = 8 * 2**10  # several for the small model
WAYS = ("disk", "tensor", "group")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    write_tokenizer(folder / "tokenizer")
    save_model(folder / "model", small_config(), small_model().state_dict(), folder / "tokenizer")
    return folder / "model"


@pytest.fixture
def weights(tmp_path: Path) -> WeightsPublished:
    return WeightsPublisher(tmp_path).publish(7, dict(small_model(seed=7).named_parameters()))


def assert_all_loaded(server: WeightServer, dtype: torch.dtype = torch.float32) -> None:
    published = dict(small_model(seed=7).named_parameters())
    assert {tensor.dtype for tensor in server.loaded.values()} == {dtype}
    loaded = {name: tensor.float() for name, tensor in server.loaded.items()}
    assert_close(loaded, {name: tensor.to(dtype).float() for name, tensor in published.items()}, rtol=0, atol=0)
    assert server.version == "7"


def way_named(name: str, checkpoint: Path, folder: Path, dtype: torch.dtype = torch.float32) -> WeightsWay:
    layout, checksums = PublishedLayout(checkpoint, dtype), Checksums(folder / "checksums", "sglang-0")
    match name:
        case "disk":
            return DiskWeights(layout, checksums, folder / "for_server")
        case "tensor":
            return TensorWeights(layout, checksums, SMALL_BUCKET)
        case _:
            return GroupWeights(layout, checksums, SMALL_BUCKET, timeout_s=20.0, answer_s=0.1)


Make = Callable[..., WeightsWay]


@pytest.fixture
def make(checkpoint: Path, tmp_path: Path) -> Make:
    return lambda name, dtype=torch.float32: way_named(name, checkpoint, tmp_path, dtype)


def update(way: WeightsWay, server: WeightServer, *versions: WeightsPublished) -> None:
    async def run() -> None:
        for version in versions:
            await way.update(cast(SGLangClient, server), version)
        await way.close()

    try:
        asyncio.run(run())
    finally:
        server.leave()  # what still waits for it then ends


# ---------------------------------------------------------------- every way


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", WAYS)
def test_a_server_gets_all_parameters_in_its_dtype_and_their_version(
    make: Make, weights: WeightsPublished, name: str, dtype: torch.dtype
) -> None:
    server = WeightServer()
    update(make(name, dtype), server, weights)
    assert_all_loaded(server, dtype)


@pytest.mark.parametrize("name", WAYS)
def test_requests_are_held_in_place_from_before_the_weights_until_the_cache_is_dropped(
    make: Make, weights: WeightsPublished, name: str
) -> None:
    server = WeightServer()
    update(make(name), server, weights)
    during = [call for call in server.calls if call != "init"]
    assert during[0] == "pause in_place"
    assert during[-2:] == ["flush", "resume"]
    assert name in during[1:-2]


@pytest.mark.parametrize("name", WAYS)
def test_where_requests_are_held_the_cache_is_left_as_it_is(make: Make, weights: WeightsPublished, name: str) -> None:
    server = WeightServer()
    server.holds_requests = True
    update(make(name), server, weights)
    assert server.version == "7"
    assert server.calls[-1] == "resume"


@pytest.mark.parametrize("name", WAYS)
def test_what_the_server_refuses_at_once_is_refused_and_its_requests_go_on(
    make: Make, weights: WeightsPublished, name: str
) -> None:
    server = WeightServer()
    server.refused[name] = ["weight splits are active"]
    with pytest.raises(WeightsRefused, match=r"version 7: .*weight splits are active"):
        update(make(name), server, weights)
    assert server.calls.index("resume") > server.calls.index(name)
    assert server.calls.count("begin") == server.calls.count("end")


@pytest.mark.parametrize("name", WAYS)
def test_after_a_refusal_the_next_update_is_as_any(make: Make, weights: WeightsPublished, name: str) -> None:
    server, way = WeightServer(), make(name)
    server.refused[name] = ["weight splits are active"]

    async def run() -> None:
        with pytest.raises(WeightsRefused):
            await way.update(cast(SGLangClient, server), weights)
        await way.update(cast(SGLangClient, server), weights)
        await way.close()

    asyncio.run(run())
    assert_all_loaded(server)


@pytest.mark.parametrize(
    ("name", "said"),
    [("disk", "Failed to update weights: x.\nRolling back to original weights."), ("group", "x. partially updated.")],
)
def test_a_server_that_has_begun_to_write_is_not_let_go_on(
    make: Make, weights: WeightsPublished, name: str, said: str
) -> None:
    server = WeightServer()
    server.refused[name] = [said]
    with pytest.raises(EngineFailure, match="loaded in part") as failure:
        update(make(name), server, weights)
    assert not isinstance(failure.value, WeightsRefused)
    assert "resume" not in server.calls


@pytest.mark.parametrize("name", WAYS)
def test_a_server_that_says_another_version_afterwards_has_failed(
    make: Make, weights: WeightsPublished, name: str
) -> None:
    class Forgetful(WeightServer):
        async def flush_cache(self) -> bool:
            self.version = "6"
            return True

    with pytest.raises(EngineFailure, match="has version 6, it was given 7") as failure:
        update(make(name), Forgetful(), weights)
    assert not isinstance(failure.value, WeightsRefused)


@pytest.mark.parametrize("name", WAYS)
def test_a_server_that_holds_something_else_than_another_has_failed_and_its_requests_stay_held(
    make: Make, weights: WeightsPublished, name: str
) -> None:
    class Careless(WeightServer):
        async def checksums(self) -> list[RankChecksums]:
            self.loaded["model.layers.0.self_attn.k_proj.weight"][-1, -1] += 1.0
            return await super().checksums()

    update(make(name), WeightServer(), weights)
    update(make(name), WeightServer(), weights)
    server = Careless()
    with pytest.raises(EngineFailure, match="the same version 7 and hold different weights") as failure:
        update(make(name), server, weights)
    assert not isinstance(failure.value, WeightsRefused)
    assert "resume" not in server.calls


@pytest.mark.parametrize("name", WAYS)
def test_weights_that_cannot_be_read_are_refused_before_anything_is_held(
    make: Make, weights: WeightsPublished, name: str
) -> None:
    server = WeightServer()
    with pytest.raises(WeightsRefused, match="overwritten, or are damaged"):
        update(make(name), server, replace(weights, digest="00" * 16))
    assert server.calls == []


def test_a_folder_that_cannot_be_written_is_named_and_nothing_is_held(
    checkpoint: Path, tmp_path: Path, weights: WeightsPublished
) -> None:
    server = WeightServer()
    (tmp_path / "file").touch()
    way = way_named("disk", checkpoint, tmp_path / "file")
    with pytest.raises(WeightsRefused, match=r"cannot be written to .*file/for_server"):
        update(way, server, weights)
    assert server.calls == []


def test_the_folder_is_gone_after_an_update_and_after_a_refused_one(
    make: Make, tmp_path: Path, weights: WeightsPublished
) -> None:
    update(make("disk"), WeightServer(), weights)
    assert not (tmp_path / "for_server").exists()
    server = WeightServer()
    server.refused["disk"] = ["no"]
    with pytest.raises(WeightsRefused):
        update(make("disk"), server, weights)
    assert not (tmp_path / "for_server").exists()


# ---------------------------------------------------------------- in buckets


@pytest.mark.parametrize("name", ["tensor", "group"])
def test_an_update_that_somebody_left_open_is_closed_first(make: Make, weights: WeightsPublished, name: str) -> None:
    server = WeightServer()
    asyncio.run(server.begin_update())
    update(make(name), server, weights)
    assert server.version == "7"
    assert server.calls.count("begin") == server.calls.count("end") == 2


@pytest.mark.parametrize("name", ["tensor", "group"])
def test_a_refusal_after_the_first_bucket_leaves_requests_held(
    make: Make, weights: WeightsPublished, name: str
) -> None:
    class FullAfterOne(WeightServer):
        def _note(self, call: str) -> None:
            if call == name and name in self.calls:
                self.refused[name] = ["out of memory"]
            super()._note(call)

    server = FullAfterOne()
    with pytest.raises(EngineFailure, match=r"loaded in part: .*out of memory") as failure:
        update(make(name), server, weights)
    assert not isinstance(failure.value, WeightsRefused)
    assert "resume" not in server.calls
    assert server.version == "default"


@pytest.mark.parametrize("name", ["tensor", "group"])
def test_replicas_are_refused_by_the_names_of_the_keys(make: Make, weights: WeightsPublished, name: str) -> None:
    server = WeightServer(dp_size=2)
    said = f'sglang.weights = "{name}" does not work with sglang.data_parallel = 2'
    with pytest.raises(UnusableInput, match=said):
        make(name).check(asyncio.run(server.server_info()))
    with pytest.raises(UnusableInput, match=said):
        update(make(name), server, weights)
    assert server.calls == []


def test_a_folder_serves_replicas(make: Make, weights: WeightsPublished) -> None:
    server = WeightServer(dp_size=2)
    update(make("disk"), server, weights)
    assert server.version == "7"


def test_each_tensor_parallel_rank_gets_a_payload(make: Make, weights: WeightsPublished) -> None:
    server = WeightServer(tp_size=2)
    update(make("tensor"), server, weights)
    assert_all_loaded(server)


def test_buckets_hold_all_parameters_in_order_and_no_more_bytes_than_asked_for() -> None:
    parameters = {name: torch.zeros(size) for name, size in (("a", 2), ("b", 3), ("c", 9), ("d", 1), ("e", 4))}
    assert [list(bucket) for bucket in buckets(parameters, 20)] == [["a", "b"], ["c"], ["d", "e"]]


def test_tied_embeddings_are_published_once_and_untied_ones_with_their_head(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer")
    for tied in (True, False):
        model = small_model(config=small_config(tie_word_embeddings=tied))
        save_model(tmp_path / "model", model.config, model.state_dict(), tmp_path / "tokenizer")
        published = WeightsPublisher(tmp_path / f"{tied}").publish(1, dict(model.named_parameters()))
        names = PublishedLayout(tmp_path / "model", torch.float32).read(published).keys()
        assert ("lm_head.weight" in names) is not tied


def test_requests_of_different_weights_have_different_keys_even_if_their_number_is_the_same(
    weights: WeightsPublished,
) -> None:
    others = (replace(weights, version=8), replace(weights, digest="ab" * 16))
    assert len({extra_key(version) for version in (weights, *others)}) == 3


# ---------------------------------------------------------------- the group


def test_a_group_is_made_once_and_kept(make: Make, weights: WeightsPublished) -> None:
    server = WeightServer()
    update(make("group"), server, weights, weights)
    assert server.calls.count("init") == 1


def test_after_a_server_has_lost_its_group_the_next_update_makes_another(make: Make, weights: WeightsPublished) -> None:
    server, way = WeightServer(), make("group")

    async def run() -> None:
        await way.update(cast(SGLangClient, server), weights)
        server.leave()
        with pytest.raises(WeightsRefused, match=r"Failed to receive weights: Group .* not in \[\]"):
            await way.update(cast(SGLangClient, server), weights)
        assert server.calls[-2:] == ["resume", "destroy"]
        await way.update(cast(SGLangClient, server), weights)
        await way.close()

    asyncio.run(run())
    assert server.calls.count("init") == 2
    assert_all_loaded(server)


def test_a_server_that_leaves_during_a_broadcast_ends_it(make: Make, weights: WeightsPublished) -> None:
    server = WeightServer()
    server.leaves_during_broadcast = True
    with pytest.raises(WeightsRefused, match="Failed to receive weights"):
        update(make("group"), server, weights)


def test_a_server_that_refuses_a_group_gets_none(checkpoint: Path, tmp_path: Path, weights: WeightsPublished) -> None:
    server = WeightServer()
    server.refused["init"] = ["Failed to initialize custom process group: no route"]
    layout = PublishedLayout(checkpoint, torch.float32)
    way = GroupWeights(layout, Checksums(tmp_path, "sglang-0"), SMALL_BUCKET, timeout_s=0.5)
    with pytest.raises(WeightsRefused, match=r"no group with the server: .*no route"):
        update(way, server, weights)
    assert way.group_name is None
    assert "pause in_place" not in server.calls


@pytest.mark.slow
def test_a_server_that_neither_takes_part_nor_answers_is_given_up(
    checkpoint: Path, tmp_path: Path, weights: WeightsPublished
) -> None:
    server = WeightServer()
    server.stays_silent = True
    layout = PublishedLayout(checkpoint, torch.float32)
    way = GroupWeights(layout, Checksums(tmp_path, "sglang-0"), 1 << 30, timeout_s=0.5, answer_s=0.1)
    with pytest.raises(EngineFailure, match=r"the server does not answer; here: .*([Tt]imed out|timeout)") as failure:
        update(way, server, weights)
    assert not isinstance(failure.value, WeightsRefused)
    assert "resume" not in server.calls


def test_an_update_that_is_cancelled_lets_the_server_out_of_the_broadcast(
    make: Make, weights: WeightsPublished
) -> None:
    class Waiting(WeightServer):
        """Waits for more than it is sent."""

        async def update_from_group(self, names: Any, dtypes: Any, shapes: Any, *_: Any, **__: Any) -> None:
            more = [torch.empty(shape) for shape in (*shapes, [1])]
            self.receiving = asyncio.ensure_future(asyncio.to_thread(self._receive, more, self.groups.popitem()[1]))
            self.waits.set()
            await asyncio.shield(self.receiving)

    async def run() -> None:
        server, way = Waiting(), make("group")
        server.waits = asyncio.Event()
        updating = asyncio.ensure_future(way.update(cast(SGLangClient, server), weights))
        await server.waits.wait()
        updating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await updating
        with pytest.raises(RuntimeError):
            await server.receiving

    asyncio.run(run())


def test_a_way_is_checked_by_what_the_server_says_of_itself(make: Make) -> None:
    alone = ServerInfo("0.5.23", "/model", 1, 1, 1, 1, 1, 2, "cpu", False, False, False, False)
    for name in WAYS:
        make(name).check(alone)

"""Tests of published adapters: engines merge them with a base that is published once and reaches every node."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from asterism.bus.messages import WeightsPublished
from asterism.bus.transport.curve_auth import generate_key, load_key
from asterism.configs.schema.algorithm import Sampling
from asterism.engine.contract import Capacity, EngineFailure, Generation, GenerationRequest, WeightsRefused
from asterism.engine.inference.embedded import EmbeddedEngine
from asterism.engine.learner.adapters.adapter_publisher import AdapterPublisher
from asterism.engine.model.causal_lm import CausalLM
from asterism.engine.model.lora_linear import list_adapter_parameters, list_base_parameters
from asterism.engine.model.lora_options import LoraOptions
from asterism.engine.weight_transfer.adapter_slots import AdapterLoader, read_base
from asterism.engine.weight_transfer.slot_file import get_slot_path
from asterism.engine.weight_transfer.slot_writer import SlotWriter
from asterism.engine.weight_transfer.weight_client import WeightsFetcher
from asterism.engine.weight_transfer.weight_layout import get_layout
from asterism.engine.weight_transfer.weight_server import WeightServer
from tests.engine.learner.adapters.adapted_models import OPTIONS, adapted_model, fill_adapters, merge_adapters
from tests.engine.started_engines import started
from tests.engine.tiny_models import random_ids, save_small_model, small_model
from tests.engine.weight_transfer.served_weights import serving
from tests.engine.weight_transfer.slow_link import LOOPBACK
from tests.engine.whole_publisher import WholePublisher, damage, publish

pytestmark = [pytest.mark.real_clock, pytest.mark.timeout(60)]
ATTENTION = LoraOptions(2, 4.0, ("q_proj", "v_proj"))
SEQUENCES, TOKENS = 3, 24
NUM_SLOTS = 2


class AdapterLearner:
    """A learner that publishes into a folder. Its matrices B are 0 until `train` is called."""

    def __init__(
        self,
        folder: Path,
        model_type: str = "qwen3",
        options: LoraOptions = OPTIONS,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.folder, self.dtype = folder, dtype
        self.model = adapted_model(model_type, options, is_trained=False)
        self.restart()

    def restart(self) -> None:
        self.publisher = AdapterPublisher(self.folder, self.model, self.dtype, NUM_SLOTS)

    def train(self) -> None:
        fill_adapters(self.model)

    def publish(self, version: int) -> WeightsPublished:
        return publish(self.publisher, version)

    def publish_merged(self, version: int) -> WeightsPublished:
        return WholePublisher(self.folder / "merged", self.dtype).publish(version, merge_adapters(self.model))

    def load(self, published: WeightsPublished) -> dict[str, Tensor]:
        """Load as an engine does, and return the weights."""
        shapes = list_base_parameters(self.model)
        loaded = {name: torch.zeros(each.shape, dtype=self.dtype) for name, each in shapes.items()}
        AdapterLoader(self.dtype, OPTIONS).load(published, loaded)
        return loaded

    def count_bytes(self) -> tuple[int, int]:
        """Return the sizes of the base and of the adapters in bytes."""
        counts = [
            sum(each.numel() for each in parameters.values())
            for parameters in (list_base_parameters(self.model), list_adapter_parameters(self.model))
        ]
        return self.dtype.itemsize * counts[0], 4 * counts[1]


def assert_equal(loaded: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], each) for name, each in expected.items())


@pytest.fixture
def learner(tmp_path: Path) -> AdapterLearner:
    return AdapterLearner(tmp_path / "slots")


def damage_base(published: WeightsPublished) -> None:
    damage(read_base(published).locate(published))


# ---------------------------------------------------------------- engines


def make_engine(folder: Path, model: CausalLM, lora: LoraOptions | None, *, strict: bool = False) -> EmbeddedEngine:
    saved = save_small_model(folder, model)
    return EmbeddedEngine(saved, Capacity(1024, 16, 128), max_running=4, lora=lora, strict=strict)


async def generate(engine: EmbeddedEngine, temperature: float) -> list[Generation]:
    requests = [
        GenerationRequest(number, random_ids(9, number), TOKENS, Sampling(temperature=temperature), seed=number)
        for number in range(SEQUENCES)
    ]
    return await asyncio.gather(*map(engine.generate, requests))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "options", "strict"),
    [("qwen3", OPTIONS, False), ("qwen3", OPTIONS, True), ("qwen2", OPTIONS, False), ("qwen3_moe", ATTENTION, False)],
)
async def test_published_adapters_and_merged_weights_generate_the_same_tokens(
    tmp_path: Path, model_type: str, options: LoraOptions, strict: bool
) -> None:
    learner = AdapterLearner(tmp_path / "slots", model_type, options)
    start = small_model(seed=3, config=learner.model.config)  # other weights, which each load must replace completely
    async with (
        started(make_engine(tmp_path / "a", start, options, strict=strict)) as (adapted, _),
        started(make_engine(tmp_path / "m", start, None, strict=strict)) as (merged, _),
    ):
        answers: list[list[int]] = []
        for version in range(3):
            await adapted.load_weights(learner.publish(version))
            await merged.load_weights(learner.publish_merged(version))
            assert adapted.version == version
            for temperature in (0.0, 1.0):
                pairs = zip(await generate(adapted, temperature), await generate(merged, temperature), strict=True)
                for found, expected in pairs:
                    assert found.token_ids.tolist() == expected.token_ids.tolist()
                    np.testing.assert_allclose(found.logprobs, expected.logprobs, rtol=0, atol=1e-5)
                    assert set(found.versions.tolist()) == {version}
            answers.append((await generate(adapted, 0.0))[0].token_ids.tolist())
            learner.train()
            if version == 1:  # the base changes, which also replaces weights without adapters
                learner.model.get_parameter("model.norm.weight").data *= -1
                learner.restart()
        assert answers[0] != answers[1] != answers[2]


async def test_an_engine_keeps_its_weights_if_the_base_is_damaged(tmp_path: Path, learner: AdapterLearner) -> None:
    async with started(make_engine(tmp_path, small_model(config=learner.model.config), OPTIONS)) as (engine, _):
        await engine.load_weights(learner.publish(1))
        expected = [each.token_ids.tolist() for each in await generate(engine, 1.0)]
        learner.train()
        published = learner.publish(2)
        damage_base(published)
        with pytest.raises(EngineFailure, match="chunk 0 of the weights of version 0 is damaged"):
            await engine.load_weights(published)
        assert engine.version == 1
        assert [each.token_ids.tolist() for each in await generate(engine, 1.0)] == expected


def test_adapted_bfloat16_weights_differ_from_merged_weights_only_by_rounding(tmp_path: Path) -> None:
    learner = AdapterLearner(tmp_path, dtype=torch.bfloat16)
    learner.train()
    loaded = learner.load(learner.publish(1))
    for name, weights in merge_adapters(learner.model).items():
        torch.testing.assert_close(loaded[name].float(), weights, rtol=2**-7, atol=2**-9)


# ---------------------------------------------------------------- slots


def test_the_base_is_written_once_and_stays_valid(learner: AdapterLearner) -> None:
    base_bytes, adapter_bytes = learner.count_bytes()
    first = learner.publish(0)
    assert_equal(learner.load(first), merge_adapters(learner.model))
    path = get_slot_path(learner.folder, NUM_SLOTS)
    base = path.read_bytes()
    learner.train()
    for version in range(1, 5):
        published = learner.publish(version)
        assert published.num_bytes == learner.publisher.num_bytes
        assert published.num_bytes < 1.1 * adapter_bytes + 64
        assert_equal(learner.load(published), merge_adapters(learner.model))
    num_bytes = read_base(published).num_bytes
    assert base_bytes <= num_bytes < 1.1 * base_bytes
    assert path.read_bytes() == base
    damage_base(published)
    damaged = path.read_bytes()
    learner.publish(5)
    assert path.read_bytes() == damaged != base
    assert sorted(each.name for each in learner.folder.iterdir()) == ["slot_0", "slot_1", "slot_2"]
    learner.publisher.close()
    assert list(learner.folder.iterdir()) == []


def test_the_digest_depends_on_the_base_the_adapters_and_the_scale(tmp_path: Path) -> None:
    def digest(name: str, options: LoraOptions = OPTIONS, *, changed: str = "") -> str:
        learner = AdapterLearner(tmp_path / name, options=options)
        learner.train()
        if changed:
            learner.model.get_parameter(changed).data[0] += 1
        return learner.publish(1).digest

    same, again = digest("one"), digest("two")
    assert same == again
    others = [
        digest("base", changed="model.norm.weight"),
        digest("adapter", changed="model.layers.1.self_attn.q_proj.lora_B.weight"),
        digest("scale", OPTIONS._replace(alpha=6.0)),
    ]
    assert len({same, *others}) == 4


def test_a_restarted_learner_publishes_the_same_base_and_digests(learner: AdapterLearner) -> None:
    learner.train()
    published = learner.publish(3)
    slot = get_slot_path(learner.folder, NUM_SLOTS)
    for lose in (lambda: None, slot.unlink, lambda: damage_base(published)):
        lose()
        learner.restart()
        assert learner.publish(3) == published
        assert_equal(learner.load(published), merge_adapters(learner.model))


def test_adapters_are_refused_if_the_base_is_not_finished(learner: AdapterLearner) -> None:
    published = learner.publish(3)
    slots = SlotWriter(learner.folder, get_layout(list_base_parameters(learner.model), torch.float32), 1, NUM_SLOTS)
    slots.prepare(0)
    with pytest.raises(WeightsRefused, match="the slot is being overwritten"):
        learner.load(published)
    del slots  # the kernel releases the lock, as after a kill of the process
    with pytest.raises(WeightsRefused, match="holds version -1, not 0"):
        learner.load(published)
    get_slot_path(learner.folder, NUM_SLOTS).unlink()
    with pytest.raises(WeightsRefused, match="No such file"):
        learner.load(published)
    learner.restart()
    assert_equal(learner.load(learner.publish(3)), merge_adapters(learner.model))


# ---------------------------------------------------------------- another node


class AdapterScene:
    """The node of the learner with a weight server, and the folder of another node."""

    def __init__(self, folder: Path) -> None:
        self.learner, self.near = AdapterLearner(folder / "far"), folder / "near"
        self.key = load_key(generate_key(folder / "keys"))
        self.server = WeightServer(self.learner.folder, LOOPBACK, 0, self.key)

    async def fetch(self, published: WeightsPublished) -> tuple[WeightsPublished, int]:
        """Fetch as a newly started generator does. Return the weights on its node and the downloaded bytes."""
        before = self.server.counts.bytes
        fetcher = WeightsFetcher(self.near, LOOPBACK, self.server.port, self.key, has_base=True)
        near = await fetcher.fetch(published)
        assert Path(near.path).parent == self.near
        return near, self.server.counts.bytes - before


@pytest.fixture
@asynccontextmanager
async def scene(tmp_path: Path) -> AsyncIterator[AdapterScene]:
    each = AdapterScene(tmp_path)
    async with serving(each.server):
        yield each


async def test_another_node_downloads_the_base_once(scene: AdapterScene) -> None:
    learner = scene.learner
    first, num_bytes = await scene.fetch(learner.publish(0))
    base_bytes = read_base(first).num_bytes
    assert num_bytes == base_bytes + first.num_bytes
    learner.train()
    published = learner.publish(1)
    second, num_bytes = await scene.fetch(published)
    assert num_bytes == published.num_bytes
    assert_equal(learner.load(second), merge_adapters(learner.model))
    assert (await scene.fetch(published))[1] == 0  # a second or restarted generator downloads nothing
    learner.restart()
    assert (await scene.fetch(learner.publish(1)))[1] == 0
    names = sorted(each.name for each in scene.near.iterdir() if each.suffix != ".lock")
    assert names == ["slot_0", "slot_1", "slot_2"]


async def test_another_node_replaces_a_base_whose_weights_have_changed(scene: AdapterScene) -> None:
    learner = scene.learner
    near, _ = await scene.fetch(learner.publish(1))
    learner.model.get_parameter("model.norm.weight").data += 1
    learner.restart()
    published = learner.publish(1)
    again, num_bytes = await scene.fetch(published)
    assert num_bytes == read_base(again).num_bytes + published.num_bytes
    assert_equal(learner.load(again), merge_adapters(learner.model))
    with pytest.raises(WeightsRefused, match="other weights of version 1"):
        learner.load(near)


async def test_another_node_refuses_adapters_if_the_base_is_missing(scene: AdapterScene) -> None:
    published = scene.learner.publish(1)
    get_slot_path(scene.learner.folder, NUM_SLOTS).unlink()
    with pytest.raises(WeightsRefused, match="no longer has weights of version 0"):
        await scene.fetch(published)

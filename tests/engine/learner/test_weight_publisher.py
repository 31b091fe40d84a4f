"""Tests: all ranks publish a model together. Each rank writes its own rows and buffers at most a bucket of others."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from asterism.bus.messages import WeightsPublished
from asterism.engine.learner import weight_publisher
from asterism.engine.learner.adapters.adapter_publisher import AdapterPublisher
from asterism.engine.learner.distributed import RankGroup
from asterism.engine.learner.sharding import load_sharded_model
from asterism.engine.learner.weight_publisher import BUCKET_BYTES, AdapterMerger, WeightPublisher
from asterism.engine.model.hf_checkpoint import load_model
from asterism.engine.model.lora_linear import list_base_parameters
from asterism.engine.model.lora_options import get_lora_options
from asterism.engine.weight_transfer.shared_memory import load_published
from tests.engine.learner.adapters.adapted_models import fill_adapters
from tests.engine.learner.rank_probes import measuring_memory
from tests.engine.learner.rank_processes import run_ranks
from tests.engine.learner.test_sharding import MB, make_config, write_model
from tests.engine.learner.training_examples import small_run
from tests.engine.tiny_models import small_config
from tests.engine.whole_publisher import WholePublisher

slow = pytest.mark.slow


class Publication(NamedTuple):
    published: WeightsPublished
    peaks: list[int]  # peak growth of each rank's anonymous memory during a publication


def publish_twice(
    ranks: RankGroup, ranks_per_node: int, checkpoint: Path, out: Path, dtype: str, settings: dict[str, Any]
) -> tuple[WeightsPublished | None, int]:
    """Publish twice; return the second message and the peak memory. Ranks on later nodes cannot write to OUT/slots."""
    learner, ranks = small_run(**settings, ranks=4).learner, ranks._replace(local_world_size=ranks_per_node)
    model = load_sharded_model(checkpoint, ranks, learner.dtype, get_lora_options(learner))
    fill_adapters(model)
    slots = out / "slots" if ranks.node == 0 else out / "another_node"
    options = getattr(torch, dtype), 1, ranks
    if learner.lora.publish == "adapters":
        publisher = AdapterPublisher(slots, model, *options)
    else:
        publisher = WeightPublisher(slots, list_base_parameters(model), *options, AdapterMerger(model))
    with measuring_memory() as peak:
        publisher.publish(1)
        published = publisher.publish(2)
    return published, peak.growth


def publish_on(
    count: int, ranks_per_node: int, checkpoint: Path, out: Path, dtype: str, settings: dict[str, Any]
) -> Publication:
    out.mkdir()
    learner = small_run(**settings, ranks=4).learner
    found = run_ranks(count, publish_twice, ranks_per_node, checkpoint, out, dtype, settings, learner=learner)
    (published,) = (message for message, _ in found if message is not None)
    return Publication(published, [peak for _, peak in found])


def load_weights(checkpoint: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: each.detach().to(dtype) for name, each in load_model(checkpoint).named_parameters()}


def assert_holds(published: WeightsPublished, expected: dict[str, Tensor]) -> None:
    loaded = {name: torch.zeros_like(each) for name, each in expected.items()}
    load_published(published, loaded, next(iter(expected.values())).dtype)
    assert all(torch.equal(loaded[name], each) for name, each in expected.items())


@slow
@pytest.mark.parametrize(
    ("ranks", "ranks_per_node", "dtype", "learner"),
    [
        pytest.param(1, 1, "bfloat16", {"dtype": "bfloat16"}, id="one rank with a mesh"),
        pytest.param(2, 2, "float32", {}, id="one node"),
        pytest.param(4, 2, "bfloat16", {}, id="a copy on two nodes", marks=pytest.mark.nightly),
        pytest.param(4, 2, "float32", {"dp_replicate": 2}, id="a copy on each node"),
    ],
)
def test_the_published_weights_contain_the_rows_of_all_ranks(
    ranks: int, ranks_per_node: int, dtype: str, learner: dict[str, str | int], tmp_path: Path
) -> None:
    model = write_model(tmp_path / "model", small_config(vocab_size=101, tie_word_embeddings=False))
    out = tmp_path / "out"
    publication = publish_on(ranks, ranks_per_node, model.folder, out, dtype, learner)
    expected = load_weights(model.folder, getattr(torch, dtype))
    assert_holds(publication.published, expected)
    whole = WholePublisher(tmp_path / "whole", getattr(torch, dtype)).publish(2, expected)
    assert publication.published.digest == whole.digest
    assert not (out / "another_node").exists()


@pytest.mark.nightly
@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_publishing_300_mb_takes_the_memory_of_two_buckets(ranks_per_node: int, tmp_path: Path) -> None:
    """A rank already has its share of the weights, so the bound covers only two buckets and a margin."""
    model = write_model(tmp_path / "model", make_config(num_layers=11, vocab_size=40_001))
    assert model.num_bytes > 300 * MB
    publication = publish_on(2, ranks_per_node, model.folder, tmp_path / "out", "bfloat16", {})
    assert_holds(publication.published, load_weights(model.folder, torch.bfloat16))
    assert max(publication.peaks) < 2 * BUCKET_BYTES + 50 * MB


def test_parameters_larger_than_a_bucket_are_written_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_publisher, "BUCKET_BYTES", 100)
    weights = {"w": torch.rand(31, 3), "v": torch.rand(7), "s": torch.tensor(2.0)[None]}
    assert_holds(WholePublisher(tmp_path).publish(1, weights), weights)

"""Tests of transformers folders in shards: grouping of tensors, the safetensors format, and reads in buckets."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from asterism.engine.export import hf_export
from asterism.engine.export.hf_export import WeightShard, plan_shards, write_index, write_shard
from asterism.engine.hf.weight_files import list_weight_files, read_weight_shapes

SHAPES = {"a": (10, 4), "b": (3,), "c": (50, 4), "d": (7, 2), "e": (1,)}  # numbers of elements: 40, 3, 200, 14, 1


def test_consecutive_tensors_share_a_shard_unless_one_is_too_large() -> None:
    shards = plan_shards(SHAPES, torch.bfloat16, max_bytes=100)
    assert [shard.names for shard in shards] == [("a", "b"), ("c",), ("d", "e")]
    assert [shard.file_name for shard in shards][1:] == [
        "model-00002-of-00003.safetensors",
        "model-00003-of-00003.safetensors",
    ]
    assert plan_shards(SHAPES, torch.float32) == [WeightShard("model.safetensors", tuple(SHAPES))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shards_contain_the_tensors_in_the_dtype_of_the_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """A bucket has at most 200 bytes, or a single larger tensor. Each conversion handles a block of 16 elements."""
    monkeypatch.setattr(hf_export, "BUCKET_BYTES", 200)
    monkeypatch.setattr(hf_export, "_BLOCK_ELEMENTS", 16)
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.rand(shape, generator=generator) for name, shape in SHAPES.items()}
    asked: list[tuple[str, ...]] = []

    def read(names: Sequence[str]) -> Mapping[str, Tensor]:
        asked.append(tuple(names))
        return {name: tensors[name] for name in names}

    shards = plan_shards(SHAPES, dtype, max_bytes=500)
    for shard in shards:
        write_shard(tmp_path, shard, SHAPES, dtype, read)
    write_index(tmp_path, shards, SHAPES, dtype)
    loaded: dict[str, Tensor] = {}
    for file in list_weight_files(tmp_path):
        loaded |= load_file(file)
        assert read_weight_shapes(file).keys() <= SHAPES.keys()
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensor.to(dtype)) for name, tensor in tensors.items())
    assert asked == [("a", "b"), ("c",), ("d", "e")]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == dtype.itemsize * 258

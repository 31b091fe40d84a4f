"""The parameters of a server and their checksums. The hashes for GPUs are those of SGLang's kernel in Triton's interpreter."""

import hashlib
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.contract import EngineFailure
from engine.sglang.http_api import ParallelismInfo, RankChecksums
from engine.sglang.weights import server_parameters
from engine.sglang.weights.checksums import ChecksumRegistry
from engine.sglang.weights.server_parameters import compute_expected_checksums
from tests.engine.sglang.server.requirements import make_info
from tests.engine.sglang.weights.test_checksums import WEIGHTS
from tests.engine.tiny_models import small_config, small_model


def hash_bytes(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).digest()[:8].hex()


@pytest.mark.parametrize(
    ("count", "dtype", "expected"),
    [
        (1, torch.float32, "3d93a6540b54ef2a"),
        (20_001, torch.float32, "d1e2a3be3f6202b7"),
        (24_593, torch.bfloat16, "99b04cfa12e4f44d"),
        (600_000, torch.float32, "75e404cae7afb36a"),
    ],
)
def test_a_checksum_on_a_gpu_is_that_of_the_servers_kernel(count: int, dtype: torch.dtype, expected: str) -> None:
    published = {"model.norm.weight": torch.arange(count).to(dtype)}
    assert compute_expected_checksums(published, "cuda", 0, 1, 0) == {"model.norm.weight": expected}


def test_fused_parameters_are_concatenated() -> None:
    published = {
        name: each.detach() for name, each in small_model(config=small_config(vocab_size=64)).named_parameters()
    }
    expected = compute_expected_checksums(published, "cpu", 0, 1, 3)
    layer = "model.layers.0."
    queries_keys_values = [published[f"{layer}self_attn.{part}_proj.weight"] for part in "qkv"]
    assert expected[f"{layer}self_attn.qkv_proj.weight"] == hash_bytes(torch.cat(queries_keys_values))
    gate_up = [published[f"{layer}mlp.{part}_proj.weight"] for part in ("gate", "up")]
    assert expected[f"{layer}mlp.gate_up_proj.weight"] == hash_bytes(torch.cat(gate_up))
    assert expected["model.embed_tokens.weight"] == hash_bytes(published["model.embed_tokens.weight"])
    assert not any(part in name for name in expected for part in (".q_proj", ".gate_proj"))


def test_a_tensor_parallel_rank_has_rows_or_columns() -> None:
    published = {
        "model.layers.0.mlp.gate_proj.weight": torch.rand(4, 3),
        "model.layers.0.mlp.up_proj.weight": torch.rand(4, 3),
        "model.layers.0.mlp.down_proj.weight": torch.rand(3, 4),
        "model.norm.weight": torch.rand(3),
    }
    gate, up, down, norm = published.values()
    assert compute_expected_checksums(published, "cpu", 1, 2, 0) == {
        "model.layers.0.mlp.gate_up_proj.weight": hash_bytes(torch.cat([gate[2:], up[2:]])),
        "model.layers.0.mlp.down_proj.weight": hash_bytes(down[:, 2:]),
        "model.norm.weight": hash_bytes(norm),
    }


def test_padded_vocabularies_and_experts_are_not_compared() -> None:
    published = {
        "model.embed_tokens.weight": torch.rand(65, 2),
        "model.layers.0.mlp.experts.0.down_proj.weight": torch.rand(2, 2),
    }
    assert compute_expected_checksums(published, "cpu", 0, 1, 0) == {}


def test_every_parameter_is_in_the_sample_of_some_version(monkeypatch: pytest.MonkeyPatch) -> None:
    published = {f"model.layers.{number}.input_layernorm.weight": torch.rand(10) for number in range(7)}
    monkeypatch.setattr(server_parameters, "SAMPLE_BYTES", 80)
    samples = [compute_expected_checksums(published, "cpu", 0, 1, version) for version in range(7)]
    assert {len(sample) for sample in samples} == {2}
    assert {name for sample in samples for name in sample} == published.keys()


def test_a_server_with_another_parameter_than_the_published_one_fails(tmp_path: Path) -> None:
    ranks = [RankChecksums({"a": "1", "b": "2"}, "all", [ParallelismInfo(0, 0)])]
    registry = ChecksumRegistry(tmp_path, "sglang-0")
    registry.verify(WEIGHTS, make_info(), ranks, [{"b": "2", "absent": "3"}])
    with pytest.raises(
        EngineFailure, match="sglang-0 holds another b on rank 0 than the learner published in version 7"
    ):
        registry.verify(WEIGHTS, make_info(), ranks, [{"b": "3"}])

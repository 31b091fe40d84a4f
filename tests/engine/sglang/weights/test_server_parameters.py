"""Tests of a server's parameters and checksums. SGLang's kernel in Triton's interpreter computed the GPU hashes."""

import hashlib
from pathlib import Path

import pytest
import torch
from torch import Tensor

from asterism.engine.contract import EngineFailure
from asterism.engine.sglang.http_api import ParallelismInfo, RankChecksums, ServerInfo
from asterism.engine.sglang.weights import server_parameters
from asterism.engine.sglang.weights.checksums import ChecksumRegistry
from asterism.engine.sglang.weights.server_parameters import compute_expected_checksums
from tests.engine.sglang.server.requirements import make_info
from tests.engine.sglang.weights.test_checksums import WEIGHTS
from tests.engine.tiny_models import small_config, small_model

LAYER = "model.layers.0."


def hash_bytes(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).digest()[:8].hex()


def pad_rows(tensor: Tensor, rows: int) -> Tensor:
    return torch.cat([tensor, torch.zeros(rows - len(tensor), *tensor.shape[1:])])


@pytest.mark.parametrize(
    ("count", "dtype", "expected"),
    [
        (1, "float32", "3d93a6540b54ef2a"),
        (20_001, "float32", "d1e2a3be3f6202b7"),
        (24_593, "bfloat16", "99b04cfa12e4f44d"),
        (600_000, "float32", "75e404cae7afb36a"),
    ],
)
def test_a_checksum_on_a_gpu_equals_the_result_of_sglangs_kernel(count: int, dtype: str, expected: str) -> None:
    published = {"model.norm.weight": torch.arange(count).to(getattr(torch, dtype))}
    server = make_info(device="cuda", dtype=dtype)
    assert compute_expected_checksums(published, server, 0, 0) == {"model.norm.weight": expected}


def test_fused_parameters_are_concatenated_and_padded_with_zeros() -> None:
    """On a CPU, the 48 rows of gate and of up and the 48 columns of down are padded to 64."""
    published = {
        name: each.detach() for name, each in small_model(config=small_config(vocab_size=65)).named_parameters()
    }
    expected = compute_expected_checksums(published, make_info(), 0, 3)
    queries_keys_values = [published[f"{LAYER}self_attn.{part}_proj.weight"] for part in "qkv"]
    assert expected[f"{LAYER}self_attn.qkv_proj.weight"] == hash_bytes(torch.cat(queries_keys_values))
    gate_up = [pad_rows(published[f"{LAYER}mlp.{part}_proj.weight"], 64) for part in ("gate", "up")]
    assert expected[f"{LAYER}mlp.gate_up_proj.weight"] == hash_bytes(torch.cat(gate_up))
    down = published[f"{LAYER}mlp.down_proj.weight"]
    assert expected[f"{LAYER}mlp.down_proj.weight"] == hash_bytes(pad_rows(down.t(), 64).t())
    embedding = published["model.embed_tokens.weight"]
    assert expected["model.embed_tokens.weight"] == hash_bytes(pad_rows(embedding, 128))
    fused = {
        name for name in published if name.split(".")[-2] in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    }
    assert not fused & expected.keys()
    assert len(expected) == len(published) - len(fused) + 2 * 2


def test_a_tensor_parallel_rank_has_a_share_of_rows_or_columns() -> None:
    published = {
        f"{LAYER}mlp.gate_proj.weight": torch.rand(4, 3),
        f"{LAYER}mlp.up_proj.weight": torch.rand(4, 3),
        f"{LAYER}mlp.down_proj.weight": torch.rand(3, 4),
        f"{LAYER}self_attn.o_proj.weight": torch.rand(3, 4),
        "lm_head.weight": torch.rand(70, 3),
        "model.norm.weight": torch.rand(3),
    }
    gate, up, down, output, head, norm = published.values()
    part_of_rank_1 = {
        f"{LAYER}mlp.gate_proj.weight": gate[2:],
        f"{LAYER}mlp.up_proj.weight": up[2:],
        f"{LAYER}mlp.down_proj.weight": down[:, 2:],
        f"{LAYER}self_attn.o_proj.weight": output[:, 2:],
        "lm_head.weight": head[64:],
        "model.norm.weight": norm,
    }
    on_two_gpus = make_info(device="cuda", tp_size=2)
    assert compute_expected_checksums(published, on_two_gpus, 1, 0) == compute_expected_checksums(
        part_of_rank_1, make_info(device="cuda"), 0, 0
    )
    # On a CPU, 4 rows become 64, so rank 1 has only padding.
    assert compute_expected_checksums(published, make_info(tp_size=2), 1, 0) == {
        f"{LAYER}mlp.gate_up_proj.weight": hash_bytes(torch.zeros(64, 3)),
        f"{LAYER}mlp.down_proj.weight": hash_bytes(torch.zeros(3, 32)),
        "lm_head.weight": hash_bytes(pad_rows(head[64:], 64)),
        "model.norm.weight": hash_bytes(norm),
    }


@pytest.mark.parametrize(
    ("server", "compared"),
    [
        (make_info(), {"embed_tokens", "qkv_proj", "o_proj", "norm"}),
        (make_info(tp_size=2), {"embed_tokens", "norm"}),
        (make_info(device="cuda", tp_size=2), {"embed_tokens", "o_proj", "norm"}),
        (make_info(quantization="fp8"), set[str]()),
        (make_info(dtype="float16"), set[str]()),
        (make_info(tp_size=2, enable_dp_attention=True), set[str]()),
    ],
    ids=["cpu", "cpu_ranks", "gpu_ranks", "quantized", "converted", "dp_attention"],
)
def test_only_parameters_of_a_known_layout_are_compared(server: ServerInfo, compared: set[str]) -> None:
    attention = {f"{LAYER}self_attn.{part}_proj.weight": torch.rand(64, 64) for part in "qkvo"}
    published = {
        "model.embed_tokens.weight": torch.rand(64, 2),
        **attention,
        f"{LAYER}mlp.experts.0.down_proj.weight": torch.rand(2, 2),
        "model.norm.weight": torch.rand(2),
    }
    expected = compute_expected_checksums(published, server, 0, 0)
    assert {name.split(".")[-2] for name in expected} == compared


def test_matrices_that_a_cpu_packs_are_not_compared() -> None:
    """A CPU packs the 16-bit matrices of linear layers. tests/sglang covers the other matrices with a real server."""
    model = small_model(config=small_config(tie_word_embeddings=False)).bfloat16()
    published = {name: each.detach() for name, each in model.named_parameters()}
    expected = compute_expected_checksums(published, make_info(dtype="bfloat16"), 0, 0)
    norms = {name.split(".")[-2] for name in published if "norm" in name}
    assert {name.split(".")[-2] for name in expected} == {*norms, "embed_tokens"}


def test_each_parameter_is_sampled_in_some_version(monkeypatch: pytest.MonkeyPatch) -> None:
    published = {f"model.layers.{number}.input_layernorm.weight": torch.rand(10) for number in range(7)}
    monkeypatch.setattr(server_parameters, "SAMPLE_BYTES", 80)
    samples = [compute_expected_checksums(published, make_info(), 0, version) for version in range(7)]
    assert {len(sample) for sample in samples} == {2}
    assert {name for sample in samples for name in sample} == published.keys()


def test_a_server_whose_parameter_differs_from_the_published_one_fails(tmp_path: Path) -> None:
    ranks = [
        RankChecksums({"a": "1"}, "first", [ParallelismInfo(0, 0)]),
        RankChecksums({"b": "2"}, "second", [ParallelismInfo(0, 1)]),
    ]
    registry = ChecksumRegistry(tmp_path, "sglang-0")
    registry.verify(WEIGHTS, make_info(), ranks, [{"a": "1", "b": "2"}])
    with pytest.raises(
        EngineFailure, match="sglang-0 holds another b on rank 1 than the learner published in version 7"
    ):
        registry.verify(WEIGHTS, make_info(), ranks, [{"a": "1", "b": "3"}])
    with pytest.raises(EngineFailure, match="sglang-0 lacks c, which the learner published in version 7"):
        registry.verify(WEIGHTS, make_info(), ranks, [{"c": "3"}])

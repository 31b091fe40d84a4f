"""Tests: a rank loads only its own part of a model, and has only its shards after a forward pass."""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from asterism.configs.errors import UnusableInput
from asterism.engine.hf.architectures import ARCHITECTURES
from asterism.engine.hf.model_config import DecoderConfig
from asterism.engine.learner.batches.minibatches import build_micro_batch
from asterism.engine.learner.distributed import (
    ParallelDims,
    RankGroup,
    compute_parallel_dims,
    gather_full_parameters,
    join_ranks,
)
from asterism.engine.learner.sharding import load_sharded_model, reshard_parameters, shard_model
from asterism.engine.model.causal_lm import CausalLM
from asterism.engine.model.hf_checkpoint import BLOCK_BYTES, CheckpointError, load_model
from asterism.policies.losses.token_scores import ScoredTokens
from tests.engine.learner.learner_settings import make_learner
from tests.engine.learner.rank_probes import ParameterForm, describe_parameters, measuring_memory
from tests.engine.learner.rank_processes import run_ranks
from tests.engine.learner.training_examples import sequences, small_run, write_initial_checkpoint
from tests.engine.tiny_models import small_architecture, small_config, small_model

slow = pytest.mark.slow
MB = 10**6


class WrittenModel(NamedTuple):
    folder: Path
    sums: dict[str, float]  # sum of the elements of each tensor
    num_bytes: int  # size of all parameters in float32


def write_model(folder: Path, config: DecoderConfig) -> WrittenModel:
    """Write random weights in bfloat16, in two files with an index."""
    generator = torch.Generator().manual_seed(0)
    names = list(config.compute_weight_shapes().items())
    weight_map: dict[str, str] = {}
    sums: dict[str, float] = {}
    folder.mkdir()
    for number, part in enumerate((names[::2], names[1::2])):
        tensors = {name: torch.rand(shape, generator=generator).bfloat16() for name, shape in part}
        weight_map |= dict.fromkeys(tensors, f"{number}.safetensors")
        sums |= {name: float(tensor.double().sum()) for name, tensor in tensors.items()}
        save_file(tensors, folder / f"{number}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config.to_hf()))
    return WrittenModel(folder, sums, 4 * sum(math.prod(shape) for _, shape in names))


def make_config(num_layers: int, vocab_size: int) -> DecoderConfig:
    """Make a config. An odd `vocab_size` gives shards of different sizes."""
    return DecoderConfig(
        vocab_size=vocab_size,
        hidden_size=512,
        intermediate_size=1536,
        num_layers=num_layers,
        num_heads=8,
        num_kv_heads=4,
        head_dim=64,
        tie_word_embeddings=False,
    )


class RankReport(NamedTuple):
    loading_bytes: int  # peak growth of anonymous memory during the load
    sums: dict[str, float]  # sum of the elements of each whole parameter
    loaded: dict[str, ParameterForm]
    logprobs: list[float]
    after_forward: dict[str, ParameterForm]
    mesh: dict[str, int]  # sizes of the dimensions of the mesh, by name
    backends: list[str]  # backends of two groups: control and tensor
    timeouts_s: list[float]


def score(model: CausalLM) -> list[float]:
    """Compute log probabilities of a few tokens, without a backward pass."""
    batch = build_micro_batch(sequences(0, count=2), [1.0, 1.0])
    with torch.no_grad():
        scores = model(
            batch.token_ids_T[None],
            tokens=ScoredTokens(batch.positions_N, batch.targets_N),
            segments=batch.segments,
        )
    reshard_parameters(model)
    return scores.logprobs_N.tolist()


def load_and_score(ranks: RankGroup, checkpoint: Path, dtype: str) -> RankReport:
    """Load a model, run a forward pass, and report what the rank loads and keeps."""
    with measuring_memory() as peak:
        model = load_sharded_model(checkpoint, ranks, dtype)
    groups: list[Any] = [dist.group.WORLD, ranks.tensor_group]
    assert ranks.mesh is not None
    return RankReport(
        loading_bytes=peak.growth,
        sums={name: float(each.double().sum()) for name, each in gather_full_parameters(model).items()},
        loaded=describe_parameters(model),
        logprobs=score(model),
        after_forward=describe_parameters(model),
        mesh=dict(zip(ranks.mesh.mesh_dim_names or (), ranks.mesh.shape, strict=True)),
        backends=[dist.get_backend(group) for group in groups],
        timeouts_s=[group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups],
    )


def probe(count: int, folder: Path, **settings: str | int) -> list[RankReport]:
    learner = small_run(**settings).learner
    return run_ranks(count, load_and_score, folder, learner.dtype, learner=learner)


def check_report(report: RankReport, model: WrittenModel, ranks: int, most_bytes: float) -> None:
    assert report.sums == pytest.approx(model.sums, rel=1e-12)
    assert model.num_bytes / ranks < report.loading_bytes < most_bytes
    for forms in (report.loaded, report.after_forward):
        assert {(form.is_sharded, form.dtype) for form in forms.values()} == {(True, "torch.float32")}
        shares = [forms[name].local_share for name in model.sums]
        assert shares == pytest.approx([1 / ranks] * len(shares), abs=0.01)


@slow
def test_a_rank_loads_and_keeps_only_its_shards(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", make_config(num_layers=4, vocab_size=20_001))  # its size is 135 MB
    first, second = probe(2, model.folder, dtype="bfloat16", collective_timeout_s=77)
    for report in (first, second):
        check_report(report, model, 2, most_bytes=model.num_bytes / 2 + 50 * MB)
        assert report.mesh == {"dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 1}
        assert report.backends == ["gloo", "gloo"]
        assert report.timeouts_s == [7 * 24 * 3600, 77]
    assert first.logprobs == second.logprobs
    assert max(first.logprobs) < 0


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [2, 4])
def test_loading_300_mb_takes_the_memory_of_a_share_and_two_blocks(ranks: int, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", make_config(num_layers=11, vocab_size=40_001))
    assert model.num_bytes > 300 * MB
    for report in probe(ranks, model.folder):
        check_report(report, model, ranks, most_bytes=model.num_bytes / ranks + 2 * BLOCK_BYTES + 150 * MB)


@slow
def test_after_a_forward_pass_a_tied_model_has_only_shards(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", small_config(tie_word_embeddings=True))
    for report in probe(2, model.folder, dtype="bfloat16"):
        assert {(form.is_sharded, form.dtype) for form in report.after_forward.values()} == {(True, "torch.float32")}
        assert report.after_forward == report.loaded


def test_a_single_rank_in_float32_has_unsharded_parameters(tmp_path: Path) -> None:
    write_initial_checkpoint(tmp_path / "model")
    model = load_sharded_model(tmp_path / "model", RankGroup())
    expected = load_model(tmp_path / "model").state_dict()
    assert all(torch.equal(expected[name], tensor) for name, tensor in model.state_dict().items())
    assert all(type(parameter) is torch.nn.Parameter for parameter in model.parameters())


def test_errors_of_weight_files_name_file_and_tensor(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", small_config())
    save_file({"model.norm.weight": torch.ones(31)}, model.folder / "1.safetensors")
    with pytest.raises(CheckpointError, match=r"1\.safetensors: model\.norm\.weight has shape \[31\]"):
        load_sharded_model(model.folder, RankGroup())
    (model.folder / "1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model/1\.safetensors: no such file"):
        load_sharded_model(model.folder, RankGroup())


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_a_single_rank_in_bfloat16_has_float32_gradients(model_type: str) -> None:
    token_ids_BT = torch.arange(12)[None]
    model = small_model(config=small_architecture(model_type), std=0.1).requires_grad_(True)
    narrow = small_model(config=small_architecture(model_type), std=0.1).requires_grad_(True).to(torch.bfloat16)
    shard_model(model, RankGroup(), "bfloat16")
    found, expected = model(token_ids_BT), narrow(token_ids_BT)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, expected)
    found.float().square().sum().backward()
    expected.float().square().sum().backward()
    others = dict(narrow.named_parameters())
    for name, parameter in model.named_parameters():
        gradient, other = parameter.grad, others[name].grad
        assert gradient is not None and other is not None
        assert gradient.dtype == torch.float32
        assert float((gradient - other.float()).norm()) < 0.005 * float(gradient.norm()), name


def test_model_replicas_have_equal_numbers_of_ranks() -> None:
    assert compute_parallel_dims(8, 2) == ParallelDims(dp_replicate=2, dp_shard=4)
    assert compute_parallel_dims(8, 2).num_data_ranks == 8
    with pytest.raises(UnusableInput, match=r"learner\.dp_replicate = 3 must divide the number of ranks, .*: 8"):
        compute_parallel_dims(8, 3)


def test_the_error_for_a_rank_without_a_gpu_names_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(UnusableInput, match=r'learner\.device = "cuda" needs a GPU .*: rank 1 of this node finds 1;'):
        join_ranks(make_learner(device="cuda"))

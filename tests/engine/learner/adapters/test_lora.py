"""LoRA: the layers, the files, the learner's steps, and the published weights."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from bus.messages import WeightsPublished
from configs.algorithm import LearnerConfig
from configs.run_folder import RunFolder
from configs.schema import RunConfig
from engine.learner.adapters.adapter_files import fill_adapters, get_adapter_folder
from engine.learner.adapters.adapter_merger import gather_merged_parameters
from engine.learner.distributed import RankGroup
from engine.learner.learner_rank import LearnerRank
from engine.learner.trainer import Trainer
from engine.model.hf_checkpoint import load_model, save_model
from engine.model.lora import LoraOptions, get_lora_options, list_adapter_parameters, list_base_parameters
from engine.model.model_config import UnsupportedModel
from engine.model.weight_files import CheckpointError
from engine.weight_transfer.shared_memory import load_published
from tests.engine.learner.adapters.adapted_models import OPTIONS, SETTINGS, adapted_model, save_with_adapters
from tests.engine.learner.rank_processes import run_ranks
from tests.engine.learner.test_learner import make_run, no_report
from tests.engine.learner.test_several_ranks import are_equal, train
from tests.engine.learner.train_ranks import RankScript
from tests.engine.learner.training_examples import rl_sequences, rows, small_run, store_batch
from tests.engine.tiny_models import random_ids, small_architecture, small_model

pytestmark = pytest.mark.slow
TOKENS = torch.from_numpy(random_ids(24, seed=1))[None].long()


def compute_logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model.compute_logits(model(TOKENS))


# ---------------------------------------------------------------- layers and files


def test_untrained_adapters_change_nothing_and_merged_ones_compute_the_same_logits() -> None:
    base = small_model(config=small_architecture("qwen3", vocab_size=280))
    assert torch.equal(compute_logits(adapted_model(is_trained=False)), compute_logits(base))
    adapted = adapted_model()
    difference = (compute_logits(adapted) - compute_logits(base)).abs().max()
    base.load_state_dict(gather_merged_parameters(adapted))
    assert difference > 0.1
    torch.testing.assert_close(compute_logits(base), compute_logits(adapted), rtol=1e-5, atol=1e-5)


def test_experts_are_refused_with_the_targets_to_use() -> None:
    with pytest.raises(UnsupportedModel, match=r"gate_proj, down_proj of layer 1 belong to experts.*'o_proj'\]"):
        adapted_model("qwen3_moe")
    attention = LoraOptions(2, 4.0, ("q_proj", "v_proj"))
    names = list_adapter_parameters(adapted_model("qwen3_moe", attention))
    assert len(names) == 2 * 2 * 2


@pytest.mark.parametrize("targets", [(), ("all", "q_proj"), ("q_proj", "q_proj")])
def test_targets_are_all_or_different_projections(targets: Any) -> None:
    with pytest.raises(ValueError, match="lora_targets must be"):
        LearnerConfig(lora_targets=targets)


def test_the_merged_export_equals_base_plus_adapter_in_transformers(tmp_path: Path) -> None:
    """By the names and the definition of peft's files, without peft."""
    from transformers import AutoModelForCausalLM

    model = adapted_model()
    folder = save_with_adapters(tmp_path, model)
    config = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter" / "adapter_model.safetensors")
    expected: Any = AutoModelForCausalLM.from_pretrained(folder)
    for name, a_KI in tensors.items():
        if name.endswith(".lora_A.weight"):
            layer = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            product = tensors[name.replace("lora_A", "lora_B")] @ a_KI
            expected.get_parameter(f"{layer}.weight").data += config["lora_alpha"] / config["r"] * product
    save_model(tmp_path / "merged", model.config, gather_merged_parameters(model), tmp_path / "tokenizer")
    merged: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert len(tensors) == 2 * 2 * len(config["target_modules"])
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(merged.get_parameter(name), parameter, rtol=0, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(merged(TOKENS).logits, expected(TOKENS).logits, rtol=1e-5, atol=1e-5)


def test_adapters_are_read_as_they_were_saved_and_missing_ones_are_refused(tmp_path: Path) -> None:
    model = adapted_model()
    folder = get_adapter_folder(save_with_adapters(tmp_path, model))
    read = adapted_model(is_trained=False)
    fill_adapters(list_adapter_parameters(read), folder)
    for name, parameter in list_adapter_parameters(model).items():
        assert torch.equal(read.get_parameter(name), parameter)
    more = adapted_model(options=OPTIONS._replace(targets=(*OPTIONS.targets, "up_proj")))
    with pytest.raises(CheckpointError, match=r"4 tensors are missing, the first is .*up_proj"):
        fill_adapters(list_adapter_parameters(more), folder)


# ---------------------------------------------------------------- training


def test_a_step_changes_the_adapters_only_and_has_moments_for_them_only() -> None:
    model = adapted_model()
    before = {name: each.clone() for name, each in model.named_parameters()}
    trainer = Trainer(model, small_run(**SETTINGS), RankGroup())
    trainer.start_stage("rl")
    trainer.run_rl_step(rl_sequences(1))
    adapters = list_adapter_parameters(model)
    changed = {name for name, each in model.named_parameters() if not torch.equal(each, before[name])}
    assert changed == adapters.keys()
    (optimizer,) = trainer._optimizers  # pyright: ignore[reportPrivateUsage]
    assert {id(each) for each in optimizer.state} == {id(each) for each in adapters.values()}


@pytest.mark.parametrize("learner", [{}, {"dtype": "bfloat16"}])
def test_two_ranks_train_the_same_adapters_as_one(learner: dict[str, Any], tmp_path: Path) -> None:
    settings = SETTINGS | learner
    (one,) = train(1, RankScript("rl", str(tmp_path / "one"), learner=settings))
    (two,) = train(2, RankScript("rl", str(tmp_path / "two"), learner=settings))
    assert {name.rsplit(".", 2)[1] for name in one.gradients} == {"lora_A", "lora_B"}
    assert two.state["gradients"] == two.state["optimizer"] == ["torch.float32"]
    if not learner:
        assert are_equal(one, two)


@pytest.mark.parametrize("sft_steps", [0, 2])
def test_a_resumed_run_equals_an_uninterrupted_one(sft_steps: int, tmp_path: Path) -> None:
    run, folder = make_lora_run(tmp_path, sft_steps)
    straight = LearnerRank(run, folder, RankGroup())
    straight.start(None, no_report)
    for step in (1, 2, 3):
        published = straight.train(step, store_batch(folder.batches, step, rows(step))).published
        straight.save_if_due()
    assert published is not None
    expected = read_published(published, folder)
    resumed = LearnerRank(run, folder, RankGroup())
    assert resumed.start(2, no_report).step == 2
    published = resumed.train(3, store_batch(folder.batches, 3, rows(3))).published
    assert published is not None
    found = read_published(published, folder)
    start = load_model(folder.get_checkpoint_path(0)).state_dict()
    assert all(torch.equal(found[name], each) for name, each in expected.items())
    assert {name.split(".")[-2] for name, each in found.items() if not torch.equal(each, start[name])} == set(
        OPTIONS.targets
    )


def make_lora_run(path: Path, sft_steps: int) -> tuple[RunConfig, RunFolder]:
    run, folder = make_run(path, sft_steps=sft_steps)
    learner = msgspec.structs.replace(run.learner, **SETTINGS)
    return msgspec.structs.replace(run, learner=learner), folder


def read_published(published: WeightsPublished, folder: RunFolder) -> dict[str, Tensor]:
    shapes = load_model(folder.get_checkpoint_path(0)).state_dict()
    loaded = {name: torch.zeros_like(each) for name, each in shapes.items()}
    load_published(published, loaded, torch.float32)
    return loaded


@pytest.fixture(autouse=True)
def sweep(tmp_path: Path) -> Iterator[None]:
    """The launcher's cleanup at a run's end."""
    yield
    shutil.rmtree(RunFolder(tmp_path / "run").shared_memory, ignore_errors=True)


# ---------------------------------------------------------------- publishing


def test_two_ranks_publish_the_merged_weights(tmp_path: Path) -> None:
    model = adapted_model()
    folder, out = save_with_adapters(tmp_path, model), tmp_path / "out"
    out.mkdir()
    run_ranks(2, "publish_ranks", str(folder), str(out), "float32", "1", json.dumps(SETTINGS))
    published = msgspec.json.decode((out / "published.json").read_bytes(), type=WeightsPublished)
    loaded = {name: torch.zeros_like(each) for name, each in list_base_parameters(model).items()}
    load_published(published, loaded, torch.float32)
    torch.testing.assert_close(loaded, gather_merged_parameters(model), rtol=0, atol=1e-6)
    assert get_lora_options(small_run(**SETTINGS).learner) == OPTIONS

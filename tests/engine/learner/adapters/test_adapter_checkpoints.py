"""Tests of checkpoints with adapters: their contents, the exported model, and resuming."""

import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from transformers import AutoModelForCausalLM

from asterism.bus.messages import WeightsPublished
from asterism.configs.run_folder import RunFolder
from asterism.engine.hf.weight_files import CheckpointError
from asterism.engine.learner.checkpoints.checkpoint_folders import (
    delete_checkpoint,
    get_tensors_folder,
    list_saved_steps,
)
from asterism.engine.learner.distributed import RankGroup
from asterism.engine.learner.learner_rank import LearnerRank
from asterism.engine.learner.trainer import Trainer
from asterism.engine.model.hf_checkpoint import load_model
from asterism.engine.model.lora_linear import list_adapter_parameters, list_base_parameters
from asterism.engine.weight_transfer.adapter_slots import AdapterLoader
from asterism.engine.weight_transfer.shared_memory import load_published
from tests.engine.learner.adapters.adapted_models import (
    OPTIONS,
    SETTINGS,
    adapted_model,
    fill_adapters,
    merge_adapters,
    read_peft_files,
)
from tests.engine.learner.learner_runs import OpenRank, make_run, no_report, train_step
from tests.engine.learner.training_examples import rl_sequences, small_run
from tests.engine.tiny_models import random_ids, write_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("sweep")]
TOKENS = torch.from_numpy(random_ids(24, seed=1))[None].long()


# ---------------------------------------------------------------- contents


class SavedSteps(NamedTuple):
    """A checkpoint of step 0, one of step 1 after large changes, and the trainer after step 1."""

    folder: Path
    trainer: Trainer

    @property
    def first(self) -> Path:
        return self.folder / "step_000000"

    @property
    def second(self) -> Path:
        return self.folder / "step_000001"


def save_steps(folder: Path, **learner: Any) -> SavedSteps:
    write_tokenizer(folder / "tokenizer")
    trainer = Trainer(adapted_model(is_trained=False), small_run(**SETTINGS, **learner), RankGroup())
    trainer.start_stage("rl")
    trainer.save(folder / "step_000000", folder / "tokenizer", max_shard_bytes=40_000)
    trainer.finish_saving()
    fill_adapters(trainer.model)
    trainer.run_rl_step(rl_sequences(1))
    trainer.save(folder / "step_000001", folder / "tokenizer", max_shard_bytes=40_000)
    trainer.finish_saving()
    return SavedSteps(folder, trainer)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> SavedSteps:
    return save_steps(tmp_path_factory.mktemp("saved"))


def list_saved_tensors(checkpoint: Path) -> set[str]:
    return set(FileSystemReader(get_tensors_folder(checkpoint)).read_metadata().state_dict_metadata)


def test_only_the_checkpoint_of_step_0_contains_the_frozen_weights(saved: SavedSteps) -> None:
    adapters = set(list_adapter_parameters(saved.trainer.model))
    frozen = set(list_base_parameters(saved.trainer.model))
    assert list_saved_tensors(saved.first) == {f"model.{name}" for name in adapters | frozen} | {"random.cpu_0"}
    tensors = list_saved_tensors(saved.second)
    assert {name for name in tensors if name.startswith("model.")} == {f"model.{name}" for name in adapters}
    moments = {
        name.removeprefix("optimizer.state.").rpartition(".")[0] for name in tensors if name.startswith("optimizer")
    }
    assert moments == adapters


def test_the_export_in_transformers_equals_base_plus_adapter(saved: SavedSteps) -> None:
    """The test reads the files of peft without peft, by their names and definition."""
    config, tensors = read_peft_files(saved.second)
    assert config["base_model_name_or_path"] == str(saved.first)
    assert {f"base_model.model.{name}" for name in list_adapter_parameters(saved.trainer.model)} == tensors.keys()
    expected: Any = AutoModelForCausalLM.from_pretrained(saved.first)
    for name, a_KI in tensors.items():
        if name.endswith(".lora_A.weight"):
            layer = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            product = tensors[name.replace("lora_A", "lora_B")] @ a_KI
            expected.get_parameter(f"{layer}.weight").data += config["lora_alpha"] / config["r"] * product
    merged: Any = AutoModelForCausalLM.from_pretrained(saved.second)
    start = load_model(saved.first).state_dict()
    changed = {
        name.split(".")[-2] for name, each in merged.named_parameters() if (each - start[name]).abs().max() > 1e-2
    }
    assert changed == set(OPTIONS.targets)
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(merged.get_parameter(name), parameter, rtol=0, atol=1e-6)
    published = merge_adapters(saved.trainer.model)
    assert published.keys() == dict(merged.named_parameters()).keys()
    for name, weights in published.items():
        torch.testing.assert_close(merged.get_parameter(name).data, weights, rtol=0, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(merged(TOKENS).logits, expected(TOKENS).logits, rtol=1e-5, atol=1e-5)


def test_peft_adds_the_adapter_to_the_first_export(saved: SavedSteps) -> None:
    start = AutoModelForCausalLM.from_pretrained(saved.first)
    from peft import PeftModel  # the import takes a second

    merged = PeftModel.from_pretrained(start, str(saved.second / "adapter")).merge_and_unload()
    for name, weights in merge_adapters(saved.trainer.model).items():
        torch.testing.assert_close(merged.get_parameter(name).data, weights, rtol=0, atol=1e-6)


def test_the_export_has_rounded_merged_weights_and_exact_adapters(tmp_path: Path) -> None:
    rounded = save_steps(tmp_path, export_dtype="bfloat16")
    exported = AutoModelForCausalLM.from_pretrained(rounded.second, dtype=torch.bfloat16)
    for name, weights in merge_adapters(rounded.trainer.model).items():
        torch.testing.assert_close(exported.get_parameter(name).data.float(), weights, rtol=2**-8, atol=1e-6)
    _, tensors = read_peft_files(rounded.second)
    for name, each in list_adapter_parameters(rounded.trainer.model).items():
        assert torch.equal(tensors[f"base_model.model.{name}"], each)
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in (rounded.second / "adapter").iterdir()}
    assert modes == dict.fromkeys(("adapter_config.json", "adapter_model.safetensors"), "0o644")


def test_without_an_export_a_checkpoint_has_no_adapter_folder(saved: SavedSteps) -> None:
    later = saved.folder / "step_000002"
    saved.trainer.save(later, saved.folder / "tokenizer", is_exported=False)
    saved.trainer.finish_saving()
    assert {path.name for path in later.iterdir()} & {"adapter", "model.safetensors"} == set()


# ---------------------------------------------------------------- resuming


def read_published(
    published: WeightsPublished | None, folder: RunFolder, *, is_adapted: bool = False
) -> dict[str, Tensor]:
    """Load the published weights as an engine does. `is_adapted`: whether adapters are published."""
    assert published is not None
    shapes = load_model(folder.checkpoints / "init").state_dict()
    loaded = {name: torch.zeros_like(each) for name, each in shapes.items()}
    if is_adapted:
        AdapterLoader(torch.float32, OPTIONS).load(published, loaded)
    else:
        load_published(published, loaded, torch.float32)
    return loaded


def assert_equal_weights(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert all(torch.equal(found[name], each) for name, each in expected.items())


def train_steps(rank: LearnerRank, folder: RunFolder, steps: range) -> dict[str, Tensor]:
    """Run these steps, and return the weights that the last step publishes."""
    published = None
    for step in steps:
        published = train_step(rank, folder, step).published
        rank.save_if_due()
    return read_published(published, folder)


def test_published_adapters_and_merged_weights_give_engines_equal_weights(open_rank: OpenRank, tmp_path: Path) -> None:
    """The cases include a run that resumes, with and without the slots of the killed learner."""
    merged_run, merged_folder = make_run(tmp_path / "merged", sft_steps=2, **SETTINGS)
    run, folder = make_run(tmp_path, sft_steps=2, publish="adapters", **SETTINGS)
    merged, rank = open_rank(merged_run, merged_folder), open_rank(run, folder)
    starts = merged.start(None, no_report).published, rank.start(None, no_report).published
    expected = [read_published(starts[0], merged_folder)]
    found, digests, written = [read_published(starts[1], folder, is_adapted=True)], dict[int, str](), list[float]()
    for step in range(1, 4):
        expected.append(train_steps(merged, merged_folder, range(step, step + 1)))
        result = train_step(rank, folder, step)
        rank.save_if_due()
        assert result.published is not None
        digests[step] = result.published.digest
        written.append(result.metrics["publish_bytes"])
        assert result.published.num_bytes == result.metrics["publish_bytes"]
        found.append(read_published(result.published, folder, is_adapted=True))
    for each in (merged, rank):
        each.finish_saving()
    for mine, theirs in zip(found, expected, strict=True):
        assert_equal_weights(mine, theirs)
    for lose in (lambda: None, lambda: shutil.rmtree(folder.shared_memory)):
        lose()
        resumed = open_rank(run, folder)
        assert_equal_weights(
            read_published(resumed.start(2, no_report).published, folder, is_adapted=True), expected[2]
        )
        result = train_step(resumed, folder, 3)
        resumed.finish_saving()
        assert result.published is not None
        assert (result.published.digest, result.metrics["publish_bytes"]) == (digests[3], written[2])


@pytest.mark.parametrize(
    ("sft_steps", "kl_coef"),
    [(0, 0.5), *(pytest.param(*each, marks=pytest.mark.nightly) for each in ((0, 0.0), (2, 0.0), (2, 0.5)))],
)
def test_a_resumed_run_equals_an_uninterrupted_run(
    open_rank: OpenRank, sft_steps: int, kl_coef: float, tmp_path: Path
) -> None:
    """The run resumes once from the first and once from a later checkpoint."""
    run, folder = make_run(tmp_path, sft_steps=sft_steps, kl_coef=kl_coef, **SETTINGS)
    straight = open_rank(run, folder)
    started = read_published(straight.start(None, no_report).published, folder)
    expected = train_steps(straight, folder, range(1, 4))
    straight.finish_saving()
    start = load_model(folder.get_checkpoint_path(0)).state_dict()
    assert_equal_weights(started, start)
    assert {name.split(".")[-2] for name, each in expected.items() if not torch.equal(each, start[name])} == set(
        OPTIONS.targets
    )
    for step in (2, 0):
        resumed = open_rank(run, folder)
        assert resumed.start(step, no_report).step == step
        found = train_steps(resumed, folder, range(step + 1, 4))
        resumed.finish_saving()
        assert_equal_weights(found, expected)


def test_pruning_keeps_the_frozen_weights_and_their_absence_is_reported(open_rank: OpenRank, tmp_path: Path) -> None:
    run, folder = make_run(tmp_path, sft_steps=0, keep=1, every=1, **SETTINGS)
    rank = open_rank(run, folder)
    rank.start(None, no_report)
    train_steps(rank, folder, range(1, 4))
    rank.finish_saving()
    assert list_saved_steps(folder.checkpoints) == [0, 3]
    delete_checkpoint(folder.get_checkpoint_path(0))
    with pytest.raises(CheckpointError, match=r"step_000000: missing\. .* frozen weights of step_000003"):
        open_rank(run, folder).start(None, no_report)

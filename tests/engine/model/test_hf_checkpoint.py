"""Tests: a checkpoint is a transformers folder that is written atomically."""

import json
import os
import signal
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from asterism.engine.export.hf_export import save_model
from asterism.engine.hf.tokenizer import load_tokenizer
from asterism.engine.model import hf_checkpoint
from asterism.engine.model.hf_checkpoint import CheckpointError, load_model
from tests.engine.tiny_models import random_ids, save_small_model, small_config, small_model, write_tokenizer

CONFIG = small_config(vocab_size=280)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_small_model(tmp_path)


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_weights_are_cast_on_request(folder: Path) -> None:
    assert {parameter.dtype for parameter in load_model(folder, torch.bfloat16).parameters()} == {torch.bfloat16}


def test_loaded_tensors_are_aligned_for_any_header_length(folder: Path) -> None:
    assert {parameter.data_ptr() % 64 for parameter in load_model(folder).parameters()} == {0}


def test_sharded_weights_are_loaded_by_their_index(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    expected = load_model(folder).state_dict()
    (folder / "model.safetensors").unlink()
    parts = {"first.safetensors": names[:5], "second.safetensors": names[5:]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    loaded = load_model(folder).state_dict()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


@pytest.mark.slow
@pytest.mark.parametrize("block_bytes", [1, 4 * 32 * 7, hf_checkpoint.BLOCK_BYTES])
def test_the_output_matrix_of_a_tied_checkpoint_must_equal_its_embeddings(
    folder: Path, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf_checkpoint, "BLOCK_BYTES", block_bytes)
    tensors = load_file(folder / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors | {"lm_head.weight": head}, folder / "model.safetensors")
    assert "lm_head.weight" not in load_model(folder).state_dict()
    assert "lm_head.weight" not in load_model(folder, torch.bfloat16).state_dict()
    head[-1, -1] += 1
    save_file(tensors | {"lm_head.weight": head}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model.safetensors: lm_head.weight differs from .* tie_word_embeddings"):
        load_model(folder)
    save_file(tensors | {"lm_head.weight": head[:5]}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="lm_head"):
        load_model(folder)


def test_saving_replaces_the_folder_and_leaves_no_temporary_files(folder: Path, tokenizer: Path) -> None:
    save_model(folder, CONFIG, small_model(seed=1, config=CONFIG).state_dict(), tokenizer)
    token_ids = torch.from_numpy(random_ids(5, 0))[None]
    assert torch.equal(load_model(folder)(token_ids), small_model(seed=1, config=CONFIG)(token_ids))
    assert sorted(path.name for path in folder.parent.iterdir()) == ["model", "tokenizer"]


def test_a_failed_save_keeps_the_folder_and_leaves_no_temporary_files(folder: Path, tmp_path: Path) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(ValueError, match="no such file"):
        save_model(folder, CONFIG, small_model(config=CONFIG).state_dict(), tmp_path / "nowhere")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert sorted(path.name for path in folder.parent.iterdir()) == ["model", "tokenizer"]


@pytest.mark.slow
def test_a_killed_save_leaves_no_folder_and_the_next_save_succeeds(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "model"
    state_dict = small_model(config=CONFIG).state_dict()
    child = os.fork()
    if child == 0:

        def die(_: Path) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        monkeypatch.setattr("asterism.configs.atomic_write.sync_tree", die)
        save_model(target, CONFIG, state_dict, tokenizer)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert not target.exists()
    save_model(target, CONFIG, state_dict, tokenizer)
    load_model(target)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "tokenizer"]


def test_a_missing_file_is_reported(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model/model\.safetensors: no such file"):
        load_model(folder)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"model/config\.json: no such file"):
        load_model(folder)


def test_a_truncated_file_is_reported(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model/model\.safetensors: "):
        load_model(folder)


def test_a_missing_tensor_and_a_wrong_shape_are_reported(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"1 tensors are missing, the first is model\.norm\.weight"):
        load_model(folder)
    edit_config(folder, vocab_size=281)
    with pytest.raises(
        CheckpointError, match=r"embed_tokens\.weight has shape \[280, 32\].*config.json requires \[281, 32\]"
    ):
        load_model(folder)


@pytest.mark.slow
def test_transformers_has_the_same_token_ids_and_end_of_turn(folder: Path) -> None:
    from transformers import AutoTokenizer, GenerationConfig

    text, ours = "the quick<|im_end|>\nprint(1 + 1)", load_tokenizer(folder.parent / "tokenizer")
    theirs = AutoTokenizer.from_pretrained(folder)
    assert theirs(text)["input_ids"] == ours.encode(text, trusted=True)
    generation = GenerationConfig.from_pretrained(folder)
    assert generation.eos_token_id == theirs.eos_token_id == ours.end_of_turn_id


def test_the_end_of_turn_tokens_of_another_chat_format_are_kept(tmp_path: Path) -> None:
    """Llama 3's tokenizer has no ChatML tokens. The model's configuration names the tokens that end a turn."""
    source = tmp_path / "tokenizer"
    write_tokenizer(source)
    text = (source / "tokenizer.json").read_text().replace("<|im_end|>", "<|eot_id|>")
    (source / "tokenizer.json").write_text(text)
    weights = small_model(config=CONFIG).state_dict()
    with pytest.raises(ValueError, match=r"the vocabulary has no token '<\|im_end\|>'"):
        save_model(tmp_path / "model", CONFIG, weights, source)
    (source / "config.json").write_text(json.dumps({"eos_token_id": [1, 5], "bos_token_id": 3, "hidden_size": 7}))
    save_model(tmp_path / "model", CONFIG, weights, source)
    fields = json.loads((tmp_path / "model" / "config.json").read_text())
    assert (fields["eos_token_id"], fields["bos_token_id"], fields["hidden_size"]) == ([1, 5], 3, CONFIG.hidden_size)


@pytest.mark.parametrize("mask", [0o077, 0o000])
def test_all_users_can_read_the_files_with_any_umask(tmp_path: Path, tokenizer: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        save_model(tmp_path / "model", CONFIG, small_model(config=CONFIG).state_dict(), tokenizer)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "model").stat().st_mode) == 0o755
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "model").iterdir()} == {0o644}

"""Loads and saves models as transformers folders: config.json, safetensors, tokenizer."""

import json
import os
import shutil
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from engine.model.model_config import DecoderConfig, check_complete, check_names, check_shape, load_model_config
from engine.model.qwen3 import Qwen3
from engine.model.tokenizer import load_tokenizer
from engine.model.weight_files import CheckpointError, list_weight_files, read_json_object
from policies.dialogue.chat_format import TURN_END

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "chat_template.jinja"),
)
_DEFAULT_TOKENIZER_CONFIG = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}


def load_model(folder: Path | str, dtype: torch.dtype = torch.float32) -> Qwen3:
    """Raises CheckpointError or UnsupportedModel with the missing or invalid file."""
    folder = Path(folder)
    with torch.device("meta"):
        model = Qwen3(load_model_config(folder))
    expected_shapes = {name: parameter.shape for name, parameter in model.state_dict().items()}
    tensors: dict[str, Tensor] = {}
    for file in list_weight_files(folder):
        tensors |= _read_weights(file, expected_shapes, dtype)
    check_complete(folder, expected_shapes.keys() - tensors.keys())
    model.load_state_dict(tensors, assign=True)
    return model


@contextmanager
def _opening_weights(file: Path) -> Generator[Any]:
    try:
        with safe_open(file, framework="pt") as weights:
            yield weights
    except FileNotFoundError:
        raise CheckpointError(f"{file}: no such file") from None
    except SafetensorError as error:
        raise CheckpointError(f"{file}: {error}") from error


def _read_weights(file: Path, expected_shapes: Mapping[str, torch.Size], dtype: torch.dtype) -> dict[str, Tensor]:
    """The expected tensors of one file, cast. Ignores lm_head in a tied model.

    Copies the tensors: their alignment in the file depends on its header's length, and alignment
    may change the summation order of a matrix product.
    """
    tensors: dict[str, Tensor] = {}
    with _opening_weights(file) as weights:
        check_names(file, weights.keys(), expected_shapes)
        for name in weights.keys() & expected_shapes.keys():
            tensor = weights.get_tensor(name)
            check_shape(file, name, tensor.shape, expected_shapes[name])
            tensors[name] = tensor.to(dtype, copy=True)
    return tensors


def save_model(
    folder: Path | str, model_config: DecoderConfig, state_dict: Mapping[str, Tensor], tokenizer_folder: Path | str
) -> None:
    """Writes a folder for AutoModelForCausalLM and AutoTokenizer. Raises OSError on disk errors.

    Replaces an existing folder. If the process is killed, the folder is complete or missing. A
    kill between the two renames leaves the complete new folder under the name `.NAME.partial`.
    """
    folder, source = Path(folder), Path(tokenizer_folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial, replaced = folder.with_name(f".{folder.name}.partial"), folder.with_name(f".{folder.name}.replaced")
    for leftover in (partial, replaced):
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        partial.mkdir()
        _write_files(partial, model_config, state_dict, source)
        _fsync_folder(partial)
        if folder.exists():
            folder.rename(replaced)
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    shutil.rmtree(replaced, ignore_errors=True)


def _write_files(folder: Path, config: DecoderConfig, state_dict: Mapping[str, Tensor], source: Path) -> None:
    dropped = {"lm_head.weight"} if config.tie_word_embeddings else set[str]()
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state_dict.items() if name not in dropped}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    end_of_turn, kept = _find_end_of_turn(source), _read_kept_fields(source)
    _write_json(folder / "config.json", {**config.to_hf(), **kept, "eos_token_id": end_of_turn, "dtype": dtype})
    for name in (*TOKENIZER_FILES, "generation_config.json"):
        if (source / name).exists():
            shutil.copyfile(source / name, folder / name)
    if not (source / "tokenizer_config.json").exists():  # transformers would assume Qwen2's
        _write_json(folder / "tokenizer_config.json", {**_DEFAULT_TOKENIZER_CONFIG, "eos_token": TURN_END})
    if not (source / "generation_config.json").exists():
        _write_json(folder / "generation_config.json", {"do_sample": True, "eos_token_id": end_of_turn})


def _find_end_of_turn(source: Path) -> int | list[int]:
    """ChatML's token, or the tokens that the folder's configuration names, such as those of Llama 3."""
    tokenizer = load_tokenizer(source)
    if (token := tokenizer.find_token_id(TURN_END)) is not None:
        return token
    for path in (source / "generation_config.json", source / "config.json"):
        if path.exists() and (found := read_json_object(path).get("eos_token_id")) is not None:
            return found
    return tokenizer.end_of_turn_id  # raises UnusableTokenizer


def _read_kept_fields(source: Path) -> dict[str, Any]:
    """Fields of the folder's config.json that do not describe the model's layers."""
    fields = read_json_object(source / "config.json") if (source / "config.json").exists() else {}
    return {name: fields[name] for name in ("bos_token_id", "pad_token_id") if name in fields}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _fsync_folder(folder: Path) -> None:
    """Before the rename, so that a power failure cannot leave empty files in the final folder."""
    for path in (*folder.iterdir(), folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

"""Models as ordinary transformers folders: config.json, safetensors, tokenizer."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from configs.errors import UnusableInput
from engine.qwen3 import Qwen3, Qwen3Config
from engine.tokenizer import load_tokenizer
from policies.dialogue import TURN_END

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "chat_template.jinja"),
)
_PLAIN_TOKENIZER = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}


class CheckpointRefused(UnusableInput):
    """A folder that holds no usable model; the message names the file and what is wrong with it."""


def load_config(folder: Path | str) -> Qwen3Config:
    path = Path(folder) / "config.json"
    return Qwen3Config.from_hf(_read_json(path), path)


def load_model(folder: Path | str, dtype: torch.dtype = torch.float32) -> Qwen3:
    """Raises CheckpointRefused or UnsupportedModel with the file that is missing or wrong."""
    folder = Path(folder)
    config = load_config(folder)
    with torch.device("meta"):
        model = Qwen3(config)
    wanted = {name: parameter.shape for name, parameter in model.state_dict().items()}
    found: dict[str, Tensor] = {}
    for file in _weight_files(folder):
        found |= _read_weights(file, wanted, dtype)
    missing = sorted(wanted.keys() - found.keys())
    if missing:
        raise CheckpointRefused(f"{folder}: {len(missing)} tensors are missing, the first is {missing[0]}")
    model.load_state_dict(found, assign=True)
    return model


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return [folder / name for name in sorted(set(_read_json(index)["weight_map"].values()))]
    return [folder / "model.safetensors"]


def _read_weights(file: Path, wanted: Mapping[str, torch.Size], dtype: torch.dtype) -> dict[str, Tensor]:
    """The wanted tensors of one file, cast. Others are ignored: tied models carry a second lm_head.

    Copies: in the file tensors lie where its header ends, and how memory is aligned may change what a product sums first.
    """
    tensors: dict[str, Tensor] = {}
    try:
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys() & wanted.keys():
                tensor = weights.get_tensor(name)
                if tensor.shape != wanted[name]:
                    sizes = f"{list(tensor.shape)}; config.json makes it {list(wanted[name])}"
                    raise CheckpointRefused(f"{file}: {name} has shape {sizes}")
                tensors[name] = tensor.to(dtype, copy=True)
    except FileNotFoundError:
        raise CheckpointRefused(f"{file}: no such file") from None
    except SafetensorError as error:
        raise CheckpointRefused(f"{file}: {error}") from error
    return tensors


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointRefused(f"{path}: no such file") from None
    except ValueError as error:
        raise CheckpointRefused(f"{path}: {error}") from error


def save_model(
    folder: Path | str, model_config: Qwen3Config, state_dict: Mapping[str, Tensor], tokenizer_from: Path | str
) -> None:
    """Write a folder that transformers' AutoModelForCausalLM and AutoTokenizer load. OSError if the disk refuses.

    A kill at any time leaves either no folder or a complete one. A folder that was there before is replaced; a kill
    between the two renames leaves neither, and what was written as `.NAME.partial` beside it.
    """
    folder, source = Path(folder), Path(tokenizer_from)
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial, replaced = folder.with_name(f".{folder.name}.partial"), folder.with_name(f".{folder.name}.replaced")
    for leftover in (partial, replaced):
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        partial.mkdir()
        _write_files(partial, model_config, state_dict, source)
        _sync(partial)
        if folder.exists():
            folder.rename(replaced)
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    shutil.rmtree(replaced, ignore_errors=True)


def _write_files(folder: Path, config: Qwen3Config, state_dict: Mapping[str, Tensor], source: Path) -> None:
    dropped = {"lm_head.weight"} if config.tie_word_embeddings else set[str]()
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state_dict.items() if name not in dropped}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    end_of_turn = load_tokenizer(source).end_of_turn_id
    _write_json(folder / "config.json", {**config.to_hf(), "eos_token_id": end_of_turn, "dtype": dtype})
    for name in TOKENIZER_FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, folder / name)
    if not (source / "tokenizer_config.json").exists():  # without it transformers guesses Qwen2's own pre-tokenizer
        _write_json(folder / "tokenizer_config.json", {**_PLAIN_TOKENIZER, "eos_token": TURN_END})
    generation = source / "generation_config.json"
    if generation.exists():
        shutil.copyfile(generation, folder / generation.name)
    else:
        _write_json(folder / generation.name, {"do_sample": True, "eos_token_id": end_of_turn})


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _sync(folder: Path) -> None:
    """Bytes to the disk before the rename, so that a power failure leaves no complete-looking empty files."""
    for path in (*folder.iterdir(), folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

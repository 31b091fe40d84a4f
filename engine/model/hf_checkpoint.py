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
from torch.distributed.tensor import DTensor

from engine.model.causal_lm import CausalLM
from engine.model.model_config import DecoderConfig, check_complete, check_names, check_shape, load_model_config
from engine.model.tokenizer import load_tokenizer
from engine.model.weight_files import CheckpointError, list_weight_files, read_json_object
from policies.dialogue.chat_format import TURN_END

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "chat_template.jinja"),
)
BLOCK_BYTES = 64 * 2**20  # of a tensor in float32 that are read at once
_DEFAULT_TOKENIZER_CONFIG = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}


def load_model(folder: Path | str, dtype: torch.dtype = torch.float32) -> CausalLM:
    """The whole model in main memory. Raises CheckpointError or UnsupportedModel with the missing or invalid file."""
    model = build_empty_model(folder).to(dtype).to_empty(device="cpu")
    fill_parameters(dict(model.named_parameters()), folder)
    return model


def build_empty_model(folder: Path | str) -> CausalLM:
    """On the meta device: parameters have shapes and no memory. Raises CheckpointError or UnsupportedModel."""
    with torch.device("meta"):
        return CausalLM(load_model_config(folder))


def fill_parameters(parameters: Mapping[str, Tensor], folder: Path | str) -> None:
    """Read the weights into the parameters, cast to their dtype; of a sharded one, only the rows of this rank.

    `parameters`: all those of the model of config.json. Ignores lm_head in a tied model. Needs BLOCK_BYTES besides the
    parameters. Raises CheckpointError with the missing or invalid file.
    """
    folder = Path(folder)
    missing = set(parameters)
    for file in list_weight_files(folder):
        missing -= fill_from_file(parameters, file)
    check_complete(folder, missing)


def fill_from_file(parameters: Mapping[str, Tensor], file: Path) -> set[str]:
    """Read those parameters that the file contains; returns their names. Raises CheckpointError for other tensors."""
    with _opening_weights(file) as weights:
        check_names(file, weights.keys(), parameters)
        found = set(weights.keys()) & parameters.keys()
        for name in sorted(found):
            source = weights.get_slice(name)
            check_shape(file, name, source.get_shape(), parameters[name].shape)
            fill_rows(parameters[name], source)
    return found


@torch.no_grad()
def fill_rows(parameter: Tensor, source: Any) -> None:
    """`source`: the whole tensor, or a slice of safetensors. Copies the rows of this rank block by block into memory that
    torch has aligned: alignment may change the summation order of a matrix product."""
    first_row = _find_first_row(parameter)
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    if not local.numel():
        return
    block_rows = max(1, BLOCK_BYTES // (4 * local[0].numel()))
    for start in range(0, len(local), block_rows):
        block = local[start : start + block_rows]
        block.copy_(source[first_row + start : first_row + start + len(block)])


def _find_first_row(parameter: Tensor) -> int:
    """The row of the whole tensor with which this rank's part starts."""
    if not isinstance(parameter, DTensor):
        return 0
    num_parts, part = 1, 0
    for dim, placement in enumerate(parameter.placements):
        if placement.is_shard():
            assert placement.is_shard(0) and num_parts == 1, f"unknown placements {parameter.placements}"
            num_parts, part = parameter.device_mesh.size(dim), parameter.device_mesh.get_local_rank(dim)
    return find_shard_rows(len(parameter), part, num_parts).start


def find_shard_rows(num_rows: int, part: int, num_parts: int) -> slice:
    """The rows of one part: FSDP cuts rows into equal parts, rounded up."""
    part_rows = -(-num_rows // num_parts)
    return slice(min(part * part_rows, num_rows), min((part + 1) * part_rows, num_rows))


@contextmanager
def _opening_weights(file: Path) -> Generator[Any]:
    try:
        with safe_open(file, framework="pt") as weights:
            yield weights
    except FileNotFoundError:
        raise CheckpointError(f"{file}: no such file") from None
    except SafetensorError as error:
        raise CheckpointError(f"{file}: {error}") from error


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

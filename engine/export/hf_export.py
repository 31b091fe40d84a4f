"""Writes transformers folders: config.json, tokenizer files, and safetensors files ("shards").

A shard is written bucket by bucket, so that no process needs memory for more than one bucket of weights. With more than
one shard, `model.safetensors.index.json` names the file of each tensor.
"""

import json
import shutil
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from asterism.configs.atomic_write import replacing_folder
from asterism.engine.export.origin import LICENSE_FILE, ORIGIN_FILE
from asterism.engine.hf.model_config import DecoderConfig
from asterism.engine.hf.tokenizer import load_tokenizer
from asterism.engine.hf.weight_files import read_json_object
from asterism.policies.dialogue.chat_format import TURN_END

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "chat_template.jinja"),
)
MAX_SHARD_BYTES = 5 * 10**9
BUCKET_BYTES = 64 * 2**20  # size in float32 of weights that are read together; a larger tensor is read alone
_BLOCK_ELEMENTS = 2**22  # elements converted to the file's dtype at once
_DEFAULT_TOKENIZER_CONFIG = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
_DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}

Shapes = Mapping[str, Sequence[int]]  # shape of each tensor, in the order of the files
WeightReader = Callable[[Sequence[str]], Mapping[str, Tensor]]  # reads whole tensors into main memory


class WeightShard(NamedTuple):
    file_name: str
    names: tuple[str, ...]


def save_model(
    folder: Path | str, model_config: DecoderConfig, state_dict: Mapping[str, Tensor], tokenizer_folder: Path | str
) -> None:
    """Write a folder for AutoModelForCausalLM and AutoTokenizer from a whole model. Raises OSError on disk errors.

    Replaces an existing folder, as replacing_folder does.
    """
    with replacing_folder(Path(folder)) as partial:
        _write_files(partial, model_config, state_dict, Path(tokenizer_folder))


def _write_files(folder: Path, config: DecoderConfig, state_dict: Mapping[str, Tensor], source: Path) -> None:
    dropped = {"lm_head.weight"} if config.tie_word_embeddings else set[str]()
    tensors = {name: tensor.detach().cpu() for name, tensor in state_dict.items() if name not in dropped}
    dtype = next(iter(tensors.values())).dtype
    write_model_description(folder, config, source, dtype)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    shards = plan_shards(shapes, dtype)
    for shard in shards:
        write_shard(folder, shard, shapes, dtype, lambda _names: tensors)
    write_index(folder, shards, shapes, dtype)
    make_readable(folder, folder.iterdir())


# ---------------------------------------------------------------- weights


def plan_shards(shapes: Shapes, dtype: torch.dtype, max_bytes: int = MAX_SHARD_BYTES) -> list[WeightShard]:
    """Distribute consecutive tensors over shards. A tensor above `max_bytes` has its own shard."""
    groups = group_by_size(shapes, dtype.itemsize, max_bytes)
    if len(groups) == 1:
        return [WeightShard("model.safetensors", groups[0])]
    return [
        WeightShard(f"model-{number:05d}-of-{len(groups):05d}.safetensors", group)
        for number, group in enumerate(groups, 1)
    ]


def group_by_size(shapes: Shapes, element_bytes: int, max_bytes: int) -> list[tuple[str, ...]]:
    """Group consecutive tensors: at most `max_bytes` in a group, or a single larger tensor."""
    groups: list[list[str]] = [[]]
    group_bytes = 0
    for name, shape in shapes.items():
        num_bytes = element_bytes * prod(shape)
        if groups[-1] and group_bytes + num_bytes > max_bytes:
            groups.append([])
            group_bytes = 0
        groups[-1].append(name)
        group_bytes += num_bytes
    return [tuple(group) for group in groups]


def write_shard(folder: Path, shard: WeightShard, shapes: Shapes, dtype: torch.dtype, read: WeightReader) -> None:
    """Write a shard; at most BUCKET_BYTES are read at once. Raises OSError."""
    of_shard = {name: shapes[name] for name in shard.names}
    with (folder / shard.file_name).open("wb") as file:
        file.write(_encode_header(of_shard, dtype))
        for names in group_by_size(of_shard, torch.float32.itemsize, BUCKET_BYTES):
            tensors = read(names)
            for name in names:
                for block in tensors[name].detach().flatten().split(_BLOCK_ELEMENTS):
                    file.write(block.to(dtype).contiguous().view(torch.uint8).numpy().data)


def _encode_header(shapes: Shapes, dtype: torch.dtype) -> bytes:
    """Return the length and the JSON header of a safetensors file (https://huggingface.co/docs/safetensors)."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + dtype.itemsize * prod(shape)
        header[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    return struct.pack("<Q", len(encoded)) + encoded


def write_index(folder: Path, shards: Sequence[WeightShard], shapes: Shapes, dtype: torch.dtype) -> None:
    """Write the index of several shards; a single shard needs none. Raises OSError."""
    if len(shards) > 1:
        total = dtype.itemsize * sum(prod(shape) for shape in shapes.values())
        files = {name: shard.file_name for shard in shards for name in shard.names}
        _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": files})


# ---------------------------------------------------------------- configuration and tokenizer


def write_model_description(folder: Path, config: DecoderConfig, source: Path, dtype: torch.dtype) -> None:
    """Write all files except weights. `source`: the tokenizer's folder; `dtype`: the weights' dtype. Raises OSError."""
    end_of_turn, kept = _find_end_of_turn(source), _read_kept_fields(source)
    name = str(dtype).removeprefix("torch.")
    _write_json(folder / "config.json", {**config.to_hf(), **kept, "eos_token_id": end_of_turn, "dtype": name})
    for name in (*TOKENIZER_FILES, "generation_config.json", ORIGIN_FILE, LICENSE_FILE):
        if (source / name).exists():
            shutil.copyfile(source / name, folder / name)
    if not (source / "tokenizer_config.json").exists():  # without this file, transformers would use Qwen2's class
        _write_json(folder / "tokenizer_config.json", {**_DEFAULT_TOKENIZER_CONFIG, "eos_token": TURN_END})
    if not (source / "generation_config.json").exists():
        _write_json(folder / "generation_config.json", {"do_sample": True, "eos_token_id": end_of_turn})


def _find_end_of_turn(source: Path) -> int | list[int]:
    """Return the id of ChatML's end of turn, or the ids in the folder's configuration, such as Llama 3's."""
    tokenizer = load_tokenizer(source)
    if (token := tokenizer.find_token_id(TURN_END)) is not None:
        return token
    for path in (source / "generation_config.json", source / "config.json"):
        if path.exists() and (found := read_json_object(path).get("eos_token_id")) is not None:
            return found
    return tokenizer.end_of_turn_id  # raises UnusableTokenizer


def _read_kept_fields(source: Path) -> dict[str, Any]:
    """Return the fields of the folder's config.json that an export keeps: token ids, which DecoderConfig lacks."""
    fields = read_json_object(source / "config.json") if (source / "config.json").exists() else {}
    return {name: fields[name] for name in ("bos_token_id", "pad_token_id") if name in fields}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def make_readable(folder: Path, files: Iterable[Path]) -> None:
    """Set modes 0755 and 0644 regardless of the umask: other users and containers serve the model."""
    folder.chmod(0o755)
    for file in files:
        file.chmod(0o644)

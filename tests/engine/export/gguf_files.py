"""Writes GGUF files of small models, as llama.cpp's converter does."""

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

PRE_TOKENIZERS = {"qwen2": "qwen2", "qwen3": "qwen2", "llama": "llama-bpe"}
_NORMAL, _SPECIAL, _USER_DEFINED = 1, 3, 4  # types of tokens

Array = NDArray[np.float32]


class GgufChanges(NamedTuple):
    """Differences of a file from a good one."""

    architecture: str = ""
    without: Collection[str] = ()  # names of tensors
    more: Mapping[str, Array] = {}  # further tensors
    has_tokenizer: bool = True
    rope_scaling: str = ""
    split: str = ""  # name of the split before merges
    quantization: gguf.GGMLQuantizationType | None = None  # type of the matrices; None: float32


UNCHANGED = GgufChanges()


def write_gguf(file: Path, folder: Path, changes: GgufChanges = UNCHANGED) -> Path:
    """Write the model of a transformers folder of FAMILY_KINDS into a GGUF file."""
    config = json.loads((folder / "config.json").read_text())
    architecture = changes.architecture or config["model_type"]
    writer = gguf.GGUFWriter(file, architecture)
    _write_sizes(writer, config, changes)
    if changes.has_tokenizer:
        _write_tokenizer(writer, folder, changes.split or PRE_TOKENIZERS[config["model_type"]])
    tensors = _convert_tensors(load_file(folder / "model.safetensors"), config)
    for name, tensor in {**tensors, **changes.more}.items():
        if name in changes.without:
            continue
        if changes.quantization is None or tensor.ndim == 1 or tensor.shape[-1] % 32:  # a block has 32 numbers
            writer.add_tensor(name, tensor)
        else:
            writer.add_tensor(name, gguf.quantize(tensor, changes.quantization), raw_dtype=changes.quantization)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    return file


def _write_sizes(writer: gguf.GGUFWriter, config: dict[str, Any], changes: GgufChanges) -> None:
    writer.add_name("Small")
    writer.add_license("mit")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_rope_dimension_count(config["head_dim"])
    if changes.rope_scaling:
        writer.add_rope_scaling_type(gguf.RopeScalingType(changes.rope_scaling))


def _write_tokenizer(writer: gguf.GGUFWriter, folder: Path, split: str) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    added = {token["content"]: token for token in content["added_tokens"]}
    ids = content["model"]["vocab"] | {text: token["id"] for text, token in added.items()}
    tokens = sorted(ids, key=ids.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(tokens)
    writer.add_token_types([_get_type(added.get(token)) for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in content["model"]["merges"]])
    writer.add_eos_token_id(ids[config["eos_token"]])
    if config["bos_token"] is not None:
        writer.add_bos_token_id(ids[config["bos_token"]])
    writer.add_chat_template(config["chat_template"])


def _get_type(added: Mapping[str, Any] | None) -> int:
    return _NORMAL if added is None else _SPECIAL if added["special"] else _USER_DEFINED


def _convert_tensors(weights: Mapping[str, Array], config: dict[str, Any]) -> dict[str, Array]:
    architecture = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == config["model_type"])
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    converted: dict[str, Array] = {}
    for name, weight in weights.items():
        stem, suffix = name.rsplit(".", 1)
        permute: Callable[[Array, int], Array] = _permute if config["model_type"] == "llama" else _keep
        count = heads.get(stem.rsplit(".", 1)[-1], 0)
        converted[f"{names.get_name(stem)}.{suffix}"] = permute(weight, count) if count else weight
    return converted


def _permute(weight: Array, heads: int) -> Array:
    """Interleave the two halves of each head, as llama.cpp rotates adjacent pairs."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def _keep(weight: Array, _heads: int) -> Array:
    return weight

"""Exports a checkpoint with adapters from its DCP files: merged weights, and adapters in peft's format.

A checkpoint after step 0 has no frozen weights: the run's checkpoint of step 0 contains them.

`peft.PeftModel.from_pretrained(model, folder)` adds the adapters to the exported model of step 0.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from asterism.engine.export.hf_export import Shapes, WeightShard, make_readable, write_shard
from asterism.engine.learner.checkpoints.checkpoint_folders import FIRST_CHECKPOINT, get_tensors_folder
from asterism.engine.learner.checkpoints.training_state import read_whole_weights
from asterism.engine.model.lora_linear import list_adapter_parameters, list_adapters, merge_rows, name_adapter
from asterism.engine.model.lora_options import LoraOptions

_PREFIX = "base_model.model."  # prefix of all names in peft's files


class SavedAdapters(NamedTuple):
    options: LoraOptions
    shapes: Shapes  # shapes by the names of asterism.engine.model.lora_linear.list_adapter_parameters


def describe_adapters(model: nn.Module) -> SavedAdapters | None:
    """Describe the model's adapters, or return None without adapters."""
    layers = list_adapters(model)
    if not layers:
        return None
    shapes = {name: tuple(each.shape) for name, each in list_adapter_parameters(model).items()}
    return SavedAdapters(next(iter(layers.values())).options, shapes)


def get_adapter_folder(checkpoint: Path) -> Path:
    """Return a separate folder: transformers would add adapters next to model.safetensors to the merged weights."""
    return checkpoint / "adapter"


def read_merged_weights(checkpoint: Path, base: Path, adapters: SavedAdapters, shapes: Shapes) -> dict[str, Tensor]:
    """Read whole weights in float32, on one rank. `base`: the checkpoint with the frozen weights; `shapes`: the shapes
    of the weights to read, without adapters. The adapters of these weights need additional memory."""
    weights = read_whole_weights(get_tensors_folder(base), shapes)
    pairs = {name: (name_adapter(name, "A"), name_adapter(name, "B")) for name in shapes}
    pairs = {name: pair for name, pair in pairs.items() if pair[0] in adapters.shapes}
    parts_shapes = {part: adapters.shapes[part] for pair in pairs.values() for part in pair}
    parts = read_whole_weights(get_tensors_folder(checkpoint), parts_shapes) if pairs else {}
    for name, (a, b) in pairs.items():
        merge_rows(weights[name], parts[b], parts[a], adapters.options.scale, out=weights[name])
    return weights


def write_adapters(checkpoint: Path, adapters: SavedAdapters) -> list[Path]:
    """Write the adapters in float32, on one rank. Return the files. Raises OSError."""
    folder, base, options = get_adapter_folder(checkpoint), checkpoint.with_name(FIRST_CHECKPOINT), adapters.options
    folder.mkdir()
    shapes = {f"{_PREFIX}{name}": shape for name, shape in adapters.shapes.items()}
    shard = WeightShard("adapter_model.safetensors", tuple(shapes))

    def read(names: Sequence[str]) -> dict[str, Tensor]:
        wanted = {name.removeprefix(_PREFIX): shapes[name] for name in names}
        found = read_whole_weights(get_tensors_folder(checkpoint), wanted)
        return {name: found[name.removeprefix(_PREFIX)] for name in names}

    write_shard(folder, shard, shapes, torch.float32, read)
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base.absolute()),
        "r": options.rank,
        "lora_alpha": options.alpha,
        "target_modules": list(options.targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    weights, config = folder / shard.file_name, folder / "adapter_config.json"
    config.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    make_readable(folder, (weights, config))
    return [weights, config]

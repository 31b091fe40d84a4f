"""The weights of a checkpoint for an export: from the state of training, or without it from the exported model.

Each checkpoint has the state of training, in float32. Only some checkpoints have an exported model
(learner.checkpoints.export_every). Adapters are merged.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from asterism.configs.file_manifest import check_file
from asterism.engine.export.hf_export import Shapes, WeightReader, plan_shards, write_index, write_shard
from asterism.engine.hf.model_config import DecoderConfig, check_weight_shapes, load_model_config
from asterism.engine.hf.weight_files import CheckpointError, list_weight_files, read_weight_shapes
from asterism.engine.learner.checkpoints.adapter_export import SavedAdapters, describe_adapters, read_merged_weights
from asterism.engine.learner.checkpoints.checkpoint_folders import FIRST_CHECKPOINT, get_tensors_folder, is_resumable
from asterism.engine.learner.checkpoints.training_state import read_whole_weights
from asterism.engine.model.causal_lm import CausalLM
from asterism.engine.model.lora_linear import add_adapters
from asterism.engine.model.lora_options import LoraOptions


class CheckpointWeights(NamedTuple):
    config: DecoderConfig
    shapes: Shapes
    read: WeightReader  # raises CheckpointError


def open_checkpoint_weights(checkpoint: Path, options: LoraOptions | None) -> CheckpointWeights:
    """Open the weights. `options`: the run's adapters. Raises CheckpointError or UnsupportedModel."""
    config = load_model_config(checkpoint)
    shapes = config.compute_weight_shapes()
    tensors = get_tensors_folder(checkpoint)
    if not ((tensors / ".metadata").exists() and is_resumable(checkpoint)):
        return CheckpointWeights(config, shapes, _ExportedFiles(checkpoint).read)
    if options is None:
        return CheckpointWeights(config, shapes, partial(_read_state, tensors, shapes))
    base, adapters = checkpoint.with_name(FIRST_CHECKPOINT), _describe_saved_adapters(config, options)
    if not (get_tensors_folder(base) / ".metadata").exists():
        raise CheckpointError(f"{base}: missing. Only this checkpoint has the frozen weights of {checkpoint.name}")

    def read(names: Sequence[str]) -> dict[str, Tensor]:
        return read_merged_weights(checkpoint, base, adapters, {name: shapes[name] for name in names})

    return CheckpointWeights(config, shapes, read)


def write_weights(folder: Path, weights: CheckpointWeights, dtype: torch.dtype, max_shard_bytes: int) -> None:
    """Write safetensors files and their index. Raises OSError and CheckpointError."""
    shards = plan_shards(weights.shapes, dtype, max_shard_bytes)
    for shard in shards:
        write_shard(folder, shard, weights.shapes, dtype, weights.read)
    write_index(folder, shards, weights.shapes, dtype)


def _read_state(tensors: Path, shapes: Shapes, names: Sequence[str]) -> dict[str, Tensor]:
    return read_whole_weights(tensors, {name: shapes[name] for name in names})


def _describe_saved_adapters(config: DecoderConfig, options: LoraOptions) -> SavedAdapters:
    with torch.device("meta"):
        model = CausalLM(config)
    add_adapters(model, options)
    adapters = describe_adapters(model)
    assert adapters is not None
    return adapters


class _ExportedFiles:
    """The weights in the safetensors files of a folder."""

    def __init__(self, folder: Path) -> None:
        """Check the files' headers. Raises CheckpointError."""
        check_weight_shapes(folder)
        self._files = {name: file for file in list_weight_files(folder) for name in read_weight_shapes(file)}

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name in names:
            check_file(self._files[name])
            with safe_open(self._files[name], framework="pt") as weights:
                found[name] = weights.get_tensor(name)
        return found

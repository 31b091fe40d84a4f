"""Loads models from transformers folders: config.json and safetensors."""

from __future__ import annotations

import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from asterism.configs.file_manifest import check_file
from asterism.engine.hf.model_config import check_complete, check_names, check_shape, load_model_config
from asterism.engine.hf.weight_files import CheckpointError, list_weight_files
from asterism.engine.model.causal_lm import CausalLM

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_HEAD, _EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"
BLOCK_BYTES = 64 * 2**20  # size in float32 of the rows of a tensor that are read at once


def load_model(folder: Path | str, dtype: torch.dtype = torch.float32) -> CausalLM:
    """Load a whole model into main memory. Raises CheckpointError or UnsupportedModel with the file."""
    model = build_empty_model(folder).to(dtype).to_empty(device="cpu")
    fill_parameters(dict(model.named_parameters()), folder)
    return model


def build_empty_model(folder: Path | str) -> CausalLM:
    """Build a model on the meta device, with shapes and no memory. Raises CheckpointError or UnsupportedModel."""
    with torch.device("meta"):
        return CausalLM(load_model_config(folder))


def fill_parameters(parameters: Mapping[str, Tensor], folder: Path | str) -> None:
    """Read the weights into the parameters, in their dtype. A sharded parameter gets only this rank's rows.

    `parameters`: all parameters of the model of config.json. Needs BLOCK_BYTES of extra memory. Raises CheckpointError
    with the missing or invalid file, and if a tied model has an lm_head with other values than its embeddings.
    """
    folder = Path(folder)
    missing = set(parameters)
    unused_heads: list[Path] = []
    for file in list_weight_files(folder):
        with _opening_weights(file) as weights:
            check_names(file, weights.keys(), parameters)
            for name in sorted(weights.keys() & parameters.keys()):
                source = weights.get_slice(name)
                check_shape(file, name, source.get_shape(), parameters[name].shape)
                fill_rows(parameters[name], source)
                missing.discard(name)
            if _HEAD in weights.keys() - parameters.keys():
                unused_heads.append(file)
    check_complete(folder, missing)
    for file in unused_heads:
        _check_tied_head(file, parameters[_EMBEDDINGS])


def _check_tied_head(file: Path, embeddings: Tensor) -> None:
    """Raise CheckpointError if the head differs from the embeddings: the model would silently ignore the head."""
    with _opening_weights(file) as weights:
        source = weights.get_slice(_HEAD)
        check_shape(file, _HEAD, source.get_shape(), embeddings.shape)
        for block, rows in _iter_blocks(embeddings):
            if not torch.equal(block, source[rows].to(block.device, block.dtype)):
                raise CheckpointError(
                    f"{file}: {_HEAD} differs from {_EMBEDDINGS}, but config.json has tie_word_embeddings = true; "
                    "set it to false to use the head, or remove the head"
                )


@torch.no_grad()
def fill_rows(parameter: Tensor, source: Any) -> None:
    """Copy this rank's rows of `source`, a whole tensor or a slice of safetensors, block by block into the parameter.
    torch aligns the parameter's memory: alignment can change the summation order of a matrix product."""
    for block, rows in _iter_blocks(parameter):
        block.copy_(source[rows])


def _iter_blocks(parameter: Tensor) -> Generator[tuple[Tensor, slice]]:
    """Yield this rank's rows in blocks, each with its slice of the whole tensor's rows."""
    first_row = _find_first_row(parameter)
    local = parameter.to_local() if _is_sharded(parameter) else parameter
    if not local.numel():
        return
    block_rows = max(1, BLOCK_BYTES // (4 * local[0].numel()))
    for start in range(0, len(local), block_rows):
        block = local[start : start + block_rows]
        yield block, slice(first_row + start, first_row + start + len(block))


def _is_sharded(parameter: Tensor) -> TypeGuard[DTensor]:
    """Return whether this is a DTensor. There is no DTensor before the slow import of its module."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(parameter, module.DTensor)


def _find_first_row(parameter: Tensor) -> int:
    """Return the row of the whole tensor with which this rank's part starts."""
    if not _is_sharded(parameter):
        return 0
    num_parts, part = 1, 0
    for dim, placement in enumerate(parameter.placements):
        if placement.is_shard():
            assert placement.is_shard(0) and num_parts == 1, f"unknown placements {parameter.placements}"
            num_parts, part = parameter.device_mesh.size(dim), parameter.device_mesh.get_local_rank(dim)
    return find_shard_rows(len(parameter), part, num_parts).start


def find_shard_rows(num_rows: int, part: int, num_parts: int) -> slice:
    """Return the rows of one part. FSDP cuts rows into equal parts, rounded up."""
    part_rows = -(-num_rows // num_parts)
    return slice(min(part * part_rows, num_rows), min((part + 1) * part_rows, num_rows))


@contextmanager
def _opening_weights(file: Path) -> Generator[Any]:
    check_file(file)
    try:
        with safe_open(file, framework="pt") as weights:
            yield weights
    except FileNotFoundError:
        raise CheckpointError(f"{file}: no such file") from None
    except SafetensorError as error:
        raise CheckpointError(f"{file}: {error}") from error

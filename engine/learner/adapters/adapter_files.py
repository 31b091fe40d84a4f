"""Adapters in the format of peft: a folder with adapter_config.json and adapter_model.safetensors.

`peft.PeftModel.from_pretrained(model, folder)` adds them to the model that they were trained on: the checkpoint of step 0.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from engine.learner.checkpoints import FIRST_CHECKPOINT
from engine.model.hf_checkpoint import fill_from_file
from engine.model.lora import LoraOptions
from engine.model.model_config import check_complete

_PREFIX = "base_model.model."  # of all names in peft's files
_WEIGHTS = "adapter_model.safetensors"


def get_adapter_folder(checkpoint: Path) -> Path:
    """In a checkpoint's folder: transformers would add an adapter next to model.safetensors to the merged weights."""
    return checkpoint / "adapter"


def has_adapters(checkpoint: Path) -> bool:
    return get_adapter_folder(checkpoint).exists()


def save_adapters(checkpoint: Path, parameters: Mapping[str, Tensor], options: LoraOptions | None) -> None:
    """Without `options`, does nothing. `parameters`: whole ones of list_adapter_parameters. Raises OSError."""
    if options is None or not parameters:  # the cold start has no adapters
        return
    folder, base = get_adapter_folder(checkpoint), checkpoint.with_name(FIRST_CHECKPOINT)
    folder.mkdir()
    tensors = {f"{_PREFIX}{name}": each.detach().cpu().contiguous() for name, each in parameters.items()}
    save_file(tensors, folder / _WEIGHTS, metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": options.rank,
        "lora_alpha": options.alpha,
        "target_modules": list(options.targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def fill_adapters(parameters: Mapping[str, Tensor], folder: Path) -> None:
    """Read the parameters of list_adapter_parameters; of sharded ones, the rows of this rank. Raises CheckpointError."""
    file = folder / _WEIGHTS
    renamed = {f"{_PREFIX}{name}": each for name, each in parameters.items()}
    check_complete(folder, renamed.keys() - fill_from_file(renamed, file))

"""A small model with trained adapters, for the tests of LoRA."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from asterism.engine.learner.adapters.adapted_model import initialize_adapters
from asterism.engine.learner.weight_publisher import AdapterMerger
from asterism.engine.model.causal_lm import CausalLM
from asterism.engine.model.hf_checkpoint import fill_rows
from asterism.engine.model.lora_linear import add_adapters, list_adapters, list_base_parameters
from asterism.engine.model.lora_options import LoraOptions
from tests.engine.tiny_models import small_architecture, small_model

OPTIONS = LoraOptions(rank=3, alpha=12.0, targets=("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"))
SETTINGS: dict[str, Any] = {"rank": 3, "alpha": 12.0, "targets": OPTIONS.targets}  # settings of [learner.lora]


def adapted_model(model_type: str = "qwen3", options: LoraOptions = OPTIONS, *, is_trained: bool = True) -> CausalLM:
    """Build a model with adapters. B is random if `is_trained`, otherwise 0."""
    model = small_model(config=small_architecture(model_type, vocab_size=280))
    add_adapters(model, options)
    initialize_adapters(model, seed=5)
    if is_trained:
        fill_adapters(model)
    return model


def fill_adapters(model: nn.Module) -> None:
    """Set random values in A and B. They are equal for any number of ranks."""
    initialize_adapters(model, seed=5)
    generator = torch.Generator().manual_seed(6)
    for layer in list_adapters(model).values():
        b = layer.lora_B.weight
        fill_rows(b, torch.empty(b.shape).normal_(0.0, 0.1, generator=generator))


def read_peft_files(checkpoint: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    config = json.loads((checkpoint / "adapter" / "adapter_config.json").read_text())
    return config, load_file(checkpoint / "adapter" / "adapter_model.safetensors")


def merge_adapters(model: nn.Module) -> dict[str, Tensor]:
    """Return the merged weights of an unsharded model by name."""
    merger = AdapterMerger(model)
    merger.gather()
    return {name: merger.merge(name, each.detach(), 0) for name, each in list_base_parameters(model).items()}

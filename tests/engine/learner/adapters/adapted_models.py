"""A small model with trained adapters, and its checkpoint, for the tests of LoRA."""

from pathlib import Path
from typing import Any

import torch

from engine.learner.adapters.adapted_model import initialize_adapters
from engine.learner.adapters.adapter_files import save_adapters
from engine.model.causal_lm import CausalLM
from engine.model.lora import LoraOptions, add_adapters, list_adapter_parameters
from tests.engine.tiny_models import save_small_model, small_architecture, small_model

OPTIONS = LoraOptions(rank=3, alpha=12.0, targets=("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"))
SETTINGS: dict[str, Any] = {"lora_rank": 3, "lora_alpha": 12.0, "lora_targets": OPTIONS.targets}  # of [learner]


def adapted_model(model_type: str = "qwen3", options: LoraOptions = OPTIONS, *, is_trained: bool = True) -> CausalLM:
    """`is_trained`: B is random. Otherwise it is 0."""
    model = small_model(config=small_architecture(model_type, vocab_size=280))
    add_adapters(model, options)
    initialize_adapters(model, seed=5)
    if is_trained:
        generator = torch.Generator().manual_seed(6)
        with torch.no_grad():
            for name, parameter in list_adapter_parameters(model).items():
                if "lora_B" in name:
                    parameter.normal_(0.0, 0.1, generator=generator)
    return model


def save_with_adapters(folder: Path, model: CausalLM, options: LoraOptions = OPTIONS) -> Path:
    """A transformers folder of the frozen weights, with the adapters inside."""
    base = save_small_model(folder, small_model(config=model.config))
    save_adapters(base, list_adapter_parameters(model), options)
    return base

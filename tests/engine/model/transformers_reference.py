"""Builds transformers' model with the weights of a CausalLM, from a folder that save_model has written."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asterism.engine.hf.model_config import DecoderConfig
from asterism.engine.hf.rope_scaling import DefaultRope, LinearRope, Llama3Rope, RopeScaling, YarnRope
from asterism.engine.model.causal_lm import CausalLM
from tests.engine.tiny_models import save_small_model, small_architecture

CONTEXT = 64  # original context, in tokens; tests use longer sequences
SCALINGS: dict[str, RopeScaling] = {
    "default": DefaultRope(),
    "linear": LinearRope(factor=4.0),
    "yarn": YarnRope(factor=4.0, original_max_position_embeddings=CONTEXT),
    "yarn_factor": YarnRope(
        factor=4.0,
        original_max_position_embeddings=CONTEXT,
        attention_factor=0.7,
        beta_fast=20.0,
        beta_slow=2.0,
        truncate=False,
    ),
    "yarn_mscale": YarnRope(factor=4.0, original_max_position_embeddings=CONTEXT, mscale=0.7, mscale_all_dim=0.3),
    "llama3": Llama3Rope(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=CONTEXT
    ),
}


def scaled_architecture(model_type: str, scaling: str, **options: Any) -> DecoderConfig:
    """Build a small config of an architecture with one of SCALINGS."""
    longest = {} if scaling == "default" else {"max_position_embeddings": 4 * CONTEXT}
    return small_architecture(model_type, rope_scaling=SCALINGS[scaling], vocab_size=280, **longest, **options)


def load_reference(folder: Path, model: CausalLM) -> Any:
    """Load transformers' model with these weights in float32. Writes `folder`/model."""
    from transformers import AutoModelForCausalLM

    reference: Any = AutoModelForCausalLM.from_pretrained(save_small_model(folder, model))
    assert type(reference).__name__ == model.config.architecture.class_name
    return reference.eval()


def get_gradient(reference: Any, name: str) -> Tensor:
    """Return a gradient by checkpoint name. transformers stores the experts of a layer in one tensor."""
    if ".experts." not in name:
        return reference.get_parameter(name).grad
    layer, rest = name.split(".experts.")
    number, matrix, _ = rest.split(".")
    if matrix == "down_proj":
        return reference.get_parameter(f"{layer}.experts.down_proj").grad[int(number)]
    gate, up = reference.get_parameter(f"{layer}.experts.gate_up_proj").grad[int(number)].chunk(2)
    return gate if matrix == "gate_proj" else up


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference divided by the largest value."""
    with torch.no_grad():
        return float((found - expected).abs().max() / expected.abs().max())

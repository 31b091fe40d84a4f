"""A table of the supported architectures and their differences, and checks of a config.json, without torch.

All are decoder-only transformers with RMSNorm, rotary embedding, grouped-query attention and SwiGLU
(engine/model/layers.py); some have experts (engine/model/experts.py). docs/models.md describes how to add more.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from asterism.engine.hf.rope_scaling import ROPE_TYPES, read_rope


class Architecture(NamedTuple):
    """The options of one `model_type` of transformers."""

    class_name: str  # name of the class in transformers
    has_qkv_bias: bool = False
    has_qk_norm: bool = False  # RMSNorm of each head's query and key
    has_experts: bool = False
    derives_head_dim: bool = False  # head_dim defaults to hidden_size / num_attention_heads
    max_positions: int = 32_768  # default of max_position_embeddings
    only_values: Mapping[str, Any] = {}  # fields of config.json, each with its only supported value


_QWEN = {"use_sliding_window": False}
_NO_BIAS = {"attention_bias": False}
ARCHITECTURES = {
    "qwen3": Architecture("Qwen3ForCausalLM", has_qk_norm=True, only_values=_QWEN | _NO_BIAS),
    "qwen3_moe": Architecture(
        "Qwen3MoeForCausalLM", has_qk_norm=True, has_experts=True, derives_head_dim=True, only_values=_QWEN | _NO_BIAS
    ),
    "qwen2": Architecture("Qwen2ForCausalLM", has_qkv_bias=True, derives_head_dim=True, only_values=_QWEN),
    "llama": Architecture(
        "LlamaForCausalLM", derives_head_dim=True, max_positions=2048, only_values=_NO_BIAS | {"mlp_bias": False}
    ),
}
# features that the code lacks for other model types
_MISSING = {
    "deepseek_v2": "latent attention, shared experts",
    "deepseek_v3": "latent attention, shared experts, sigmoid routing",
    "gemma2": "logit soft-capping, sliding-window attention, norms after each block",
    "gemma3": "sliding-window attention, norms after each block, images",
    "gemma3_text": "sliding-window attention, norms after each block",
    "glm4": "partial rotary embedding, norms after each block",
    "glm4_moe": "partial rotary embedding, shared experts, sigmoid routing",
    "gpt_oss": "attention sinks, sliding-window attention, biases of experts",
    "llama4": "chunked attention, layers without rotary embedding, shared experts",
    "mistral": "sliding-window attention",
    "mixtral": "other names of expert weights",
    "olmo2": "norms after each block, norms of whole queries and keys",
    "phi3": "fused query, key and value weights in the checkpoint",
    "qwen2_moe": "shared experts",
    "qwen3_5": "linear attention, gated attention",
    "qwen3_next": "linear attention, gated attention, shared experts",
    "smollm3": "layers without rotary embedding",
}


def find_problem(fields: Mapping[str, Any]) -> str | None:
    """Describe the first field of a config.json with an unsupported value. Return None if all are supported."""
    model_type = fields.get("model_type")
    architecture = ARCHITECTURES.get(str(model_type))
    if architecture is None:
        missing = _MISSING.get(str(model_type), "a description of its layers")
        supported = ", ".join(sorted(ARCHITECTURES))
        return f"model_type is {model_type!r}; missing: {missing}; supported are {supported} (docs/models.md)"
    only_values = {
        **architecture.only_values,
        "hidden_act": "silu",
        "layer_types": "full_attention",
        "quantization_config": None,
        "partial_rotary_factor": 1.0,
    }
    for field, supported in only_values.items():
        found = _find_other_values(fields.get(field), supported)
        if found is not None:
            return f"{field} is {found!r}; only {supported!r} is supported"
    return _find_rope_problem(fields)


def _find_other_values(found: Any, supported: Any) -> Any:
    """Return the unsupported value, or the unsupported values of a list. A missing or null field is supported."""
    if found is None:
        return None
    if isinstance(found, list):
        return sorted({str(each) for each in found} - {supported}) or None  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    return found if found != supported else None


def _find_rope_problem(fields: Mapping[str, Any]) -> str | None:
    _, rope = read_rope(fields)
    if any(isinstance(value, dict) for value in rope.values()):
        return "rope_parameters differ by layer type; only one rotary embedding for all layers is supported"
    if (rope_type := rope["rope_type"]) not in ROPE_TYPES:
        return f"rope_type is {rope_type!r}; only {', '.join(map(repr, ROPE_TYPES))} are supported"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        return f"partial_rotary_factor is {rope['partial_rotary_factor']}; only 1.0 is supported"
    return None

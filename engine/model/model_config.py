"""The sizes of a Qwen3 model and its checkpoint's weights, by config.json; without torch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import prod
from pathlib import Path
from typing import Any

import msgspec

from configs.errors import UnusableInput
from engine.model.weight_files import CheckpointError, list_weight_files, read_json_object, read_weight_shapes


class UnsupportedModel(UnusableInput):
    """A config.json with an unsupported value. The message names the file and the field."""


class Qwen3Config(msgspec.Struct, frozen=True, kw_only=True):
    """The model's sizes. `from_hf` and `to_hf` convert from and to transformers' names."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int = msgspec.field(name="num_hidden_layers")
    num_heads: int = msgspec.field(name="num_attention_heads")
    num_kv_heads: int = msgspec.field(name="num_key_value_heads")
    head_dim: int
    rope_theta: float = 1e4
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 32_768

    @classmethod
    def from_hf(cls, fields: dict[str, Any], source: Path | str = "config.json") -> Qwen3Config:
        """From a config.json of transformers 4 or 5. Raises UnsupportedModel with the field."""
        rope: dict[str, Any] = {"rope_theta": 1e4, **fields, **(fields.get("rope_parameters") or {})}
        scaling: dict[str, Any] = fields.get("rope_scaling") or {}
        rope_type = rope.get("rope_type") or scaling.get("rope_type") or scaling.get("type") or "default"
        layer_types = set(fields.get("layer_types") or ()) - {"full_attention"}
        expected = {
            "model_type": (fields.get("model_type"), "qwen3"),
            "rope_parameters": (rope_type, "default"),
            "use_sliding_window": (bool(fields.get("use_sliding_window")), False),
            "layer_types": (sorted(layer_types), []),
            "attention_bias": (bool(fields.get("attention_bias")), False),
            "hidden_act": (fields.get("hidden_act", "silu"), "silu"),
        }
        for field, (found, supported) in expected.items():
            if found != supported:
                raise UnsupportedModel(f"{source}: {field} is {found!r}; only {supported!r} is supported")
        try:
            return msgspec.convert({**fields, "rope_theta": float(rope["rope_theta"])}, cls)
        except msgspec.ValidationError as error:
            raise UnsupportedModel(f"{source}: {error}") from None

    def to_hf(self) -> dict[str, Any]:
        """A config.json for transformers 4 and 5."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            **msgspec.to_builtins(self),
            "rope_parameters": {"rope_theta": self.rope_theta, "rope_type": "default"},
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "use_sliding_window": False,
            "sliding_window": None,
        }

    def count_cache_values(self) -> int:
        """Numbers in the KV cache per token."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    def compute_weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """By the parameter names of engine.model.qwen3.Qwen3."""
        width, inner = self.hidden_size, self.intermediate_size
        heads, kv_heads = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        layer = {
            "self_attn.q_proj": (heads, width),
            "self_attn.k_proj": (kv_heads, width),
            "self_attn.v_proj": (kv_heads, width),
            "self_attn.o_proj": (width, heads),
            "self_attn.q_norm": (self.head_dim,),
            "self_attn.k_norm": (self.head_dim,),
            "mlp.gate_proj": (inner, width),
            "mlp.up_proj": (inner, width),
            "mlp.down_proj": (width, inner),
            "input_layernorm": (width,),
            "post_attention_layernorm": (width,),
        }
        names = {f"model.layers.{index}.{name}": layer[name] for index in range(self.num_layers) for name in layer}
        head = {} if self.tie_word_embeddings else {"lm_head": (self.vocab_size, width)}
        shapes = {"model.embed_tokens": (self.vocab_size, width), **names, "model.norm": (width,), **head}
        return {f"{name}.weight": shape for name, shape in shapes.items()}


def load_model_config(folder: Path | str) -> Qwen3Config:
    """Raises CheckpointError or UnsupportedModel."""
    path = Path(folder) / "config.json"
    return Qwen3Config.from_hf(read_json_object(path), path)


def check_weight_shapes(folder: Path) -> int:
    """Check names and shapes by the headers of the weight files; returns the number of parameters in the files.

    Raises CheckpointError or UnsupportedModel.
    """
    missing = load_model_config(folder).compute_weight_shapes()
    num_parameters = 0
    for file in list_weight_files(folder):
        for name, shape in read_weight_shapes(file).items():
            num_parameters += prod(shape)
            if name in missing:
                check_shape(file, name, shape, missing.pop(name))
    check_complete(folder, missing)
    return num_parameters


def check_shape(file: Path, name: str, found: Sequence[int], expected: Sequence[int]) -> None:
    if list(found) != list(expected):
        raise CheckpointError(f"{file}: {name} has shape {list(found)}; config.json requires {list(expected)}")


def check_complete(folder: Path, missing: Collection[str]) -> None:
    if missing:
        raise CheckpointError(f"{folder}: {len(missing)} tensors are missing, the first is {min(missing)}")

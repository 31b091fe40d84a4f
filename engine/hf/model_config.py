"""Reads, without torch, the sizes and options of a model and the shapes of its weights from config.json."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import prod
from pathlib import Path
from typing import Any

import msgspec

from asterism.configs.errors import UnusableInput
from asterism.engine.hf.architectures import ARCHITECTURES, Architecture, find_problem
from asterism.engine.hf.rope_scaling import DefaultRope, RopeScaling, read_rope
from asterism.engine.hf.weight_files import CheckpointError, list_weight_files, read_json_object, read_weight_shapes


class UnsupportedModel(UnusableInput):
    """A config.json with an unsupported value. The message names the file and the field."""


class ExpertsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The options of layers with experts: a router selects some experts for each token."""

    num_experts: int
    experts_per_token: int = msgspec.field(name="num_experts_per_tok")
    expert_size: int = msgspec.field(name="moe_intermediate_size")
    normalizes_weights: bool = msgspec.field(name="norm_topk_prob", default=False)  # selected weights add up to 1
    sparse_step: int = msgspec.field(name="decoder_sparse_step", default=1)  # every n-th layer has experts
    dense_layers: tuple[int, ...] = msgspec.field(name="mlp_only_layers", default=())

    def __post_init__(self) -> None:
        if not 0 < self.experts_per_token <= self.num_experts:
            raise ValueError(f"num_experts_per_tok is {self.experts_per_token}, but num_experts is {self.num_experts}")
        if self.sparse_step < 1:
            raise ValueError(f"decoder_sparse_step is {self.sparse_step}; at least 1 is needed")

    def covers(self, layer: int) -> bool:
        return layer not in self.dense_layers and (layer + 1) % self.sparse_step == 0


class DecoderConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The model's sizes and options. `from_hf` and `to_hf` convert from and to transformers' names."""

    model_type: str = "qwen3"  # a key of ARCHITECTURES
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int = msgspec.field(name="num_hidden_layers")
    num_heads: int = msgspec.field(name="num_attention_heads")
    num_kv_heads: int = msgspec.field(name="num_key_value_heads")
    head_dim: int
    rope_theta: float = 1e4
    rope_scaling: RopeScaling = DefaultRope()
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 32_768
    experts: ExpertsConfig | None = None

    @property
    def architecture(self) -> Architecture:
        return ARCHITECTURES[self.model_type]

    @classmethod
    def from_hf(cls, fields: dict[str, Any], source: Path | str = "config.json") -> DecoderConfig:
        """Convert a config.json of transformers 4 or 5. Raises UnsupportedModel with the field."""
        if problem := find_problem(fields):
            raise UnsupportedModel(f"{source}: {problem}")
        architecture = ARCHITECTURES[fields["model_type"]]
        theta, rope_scaling = read_rope(fields)
        converted = {
            "max_position_embeddings": architecture.max_positions,
            **_derive_sizes(fields, architecture),
            "rope_theta": theta,
            "rope_scaling": rope_scaling,
            "experts": _read_experts(fields) if architecture.has_experts else None,
        }
        try:
            return msgspec.convert(converted, cls)
        except msgspec.ValidationError as error:
            raise UnsupportedModel(f"{source}: {error}") from None

    def to_hf(self) -> dict[str, Any]:
        """Return a config.json for transformers 4 (rope_theta, rope_scaling) and 5 (rope_parameters)."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        experts = fields.pop("experts") or {}
        scaling: dict[str, Any] = fields["rope_scaling"]
        return {
            "architectures": [self.architecture.class_name],
            **fields,
            **experts,
            "rope_scaling": None if isinstance(self.rope_scaling, DefaultRope) else scaling,
            "rope_parameters": {"rope_theta": self.rope_theta, **scaling},
            "hidden_act": "silu",
            "attention_dropout": 0.0,
            **self.architecture.only_values,
            **({"sliding_window": None} if "use_sliding_window" in self.architecture.only_values else {}),
        }

    def count_cache_values(self) -> int:
        """Return how many numbers the KV cache has per token."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    def count_parameters(self) -> int:
        return sum(map(prod, self.compute_weight_shapes().values()))

    def has_experts(self, layer: int) -> bool:
        """Return whether this layer has experts instead of one MLP."""
        return self.experts is not None and self.experts.covers(layer)

    def compute_weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes by the parameter names of asterism.engine.model.causal_lm.CausalLM."""
        width = self.hidden_size
        head = {} if self.tie_word_embeddings else {"lm_head.weight": (self.vocab_size, width)}
        return {
            "model.embed_tokens.weight": (self.vocab_size, width),
            **{
                f"model.layers.{layer}.{name}": shape
                for layer in range(self.num_layers)
                for name, shape in self._compute_layer_shapes(layer).items()
            },
            "model.norm.weight": (width,),
            **head,
        }

    def _compute_layer_shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        width, architecture = self.hidden_size, self.architecture
        heads, kv_heads = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        outputs = {"self_attn.q_proj": heads, "self_attn.k_proj": kv_heads, "self_attn.v_proj": kv_heads}
        shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (size, width) for name, size in outputs.items()}
        if architecture.has_qkv_bias:
            shapes |= {f"{name}.bias": (size,) for name, size in outputs.items()}
        if architecture.has_qk_norm:
            shapes |= {f"self_attn.{name}_norm.weight": (self.head_dim,) for name in ("q", "k")}
        shapes["self_attn.o_proj.weight"] = (width, heads)
        if self.experts is None or not self.has_experts(layer):
            shapes |= _compute_mlp_shapes("mlp", width, self.intermediate_size)
        else:
            shapes["mlp.gate.weight"] = (self.experts.num_experts, width)
            for index in range(self.experts.num_experts):
                shapes |= _compute_mlp_shapes(f"mlp.experts.{index}", width, self.experts.expert_size)
        return shapes | {f"{name}.weight": (width,) for name in ("input_layernorm", "post_attention_layernorm")}


def _compute_mlp_shapes(prefix: str, width: int, inner: int) -> dict[str, tuple[int, ...]]:
    names = {"gate_proj": (inner, width), "up_proj": (inner, width), "down_proj": (width, inner)}
    return {f"{prefix}.{name}.weight": shape for name, shape in names.items()}


def _derive_sizes(fields: dict[str, Any], architecture: Architecture) -> dict[str, Any]:
    """Return the fields that are not null, with the sizes that transformers derives from other fields."""
    given = {name: value for name, value in fields.items() if value is not None}
    heads, width = given.get("num_attention_heads"), given.get("hidden_size")
    if "num_key_value_heads" in fields or architecture.class_name == "LlamaForCausalLM":
        given.setdefault("num_key_value_heads", heads)
    if architecture.derives_head_dim and isinstance(heads, int) and isinstance(width, int) and heads:
        given.setdefault("head_dim", width // heads)
    return given


def _read_experts(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields with num_experts, which transformers 5 can write as num_local_experts."""
    given = {name: value for name, value in fields.items() if value is not None}
    if "num_local_experts" in given:
        given.setdefault("num_experts", given["num_local_experts"])
    return given


def load_model_config(folder: Path | str) -> DecoderConfig:
    """Read the config.json of a model's folder. Raises CheckpointError or UnsupportedModel."""
    path = Path(folder) / "config.json"
    return DecoderConfig.from_hf(read_json_object(path), path)


def check_weight_shapes(folder: Path) -> int:
    """Check names and shapes in the headers of the weight files; return the number of parameters in the files.

    Raises CheckpointError or UnsupportedModel.
    """
    expected = load_model_config(folder).compute_weight_shapes()
    missing = dict(expected)
    num_parameters = 0
    for file in list_weight_files(folder):
        shapes = read_weight_shapes(file)
        check_names(file, shapes, expected)
        for name, shape in shapes.items():
            num_parameters += prod(shape)
            if name in missing:
                check_shape(file, name, shape, missing.pop(name))
    check_complete(folder, missing)
    return num_parameters


def check_shape(file: Path, name: str, found: Sequence[int], expected: Sequence[int]) -> None:
    if list(found) != list(expected):
        raise CheckpointError(f"{file}: {name} has shape {list(found)}; config.json requires {list(expected)}")


def check_names(file: Path, names: Collection[str], expected: Collection[str]) -> None:
    """Raise CheckpointError for a tensor that does not belong to the model of config.json.

    Exceptions are the output matrix of a tied model, and rotary tables that old versions of transformers saved.
    """
    other = sorted(set(names) - set(expected) - {"lm_head.weight"})
    other = [name for name in other if not name.endswith(".rotary_emb.inv_freq")]
    if other:
        raise CheckpointError(
            f"{file}: {len(other)} tensors do not belong to the model of config.json, the first is {other[0]}"
        )


def check_complete(folder: Path, missing: Collection[str]) -> None:
    if missing:
        raise CheckpointError(f"{folder}: {len(missing)} tensors are missing, the first is {min(missing)}")

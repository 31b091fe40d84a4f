"""Computes the activation memory of a micro batch in the learner from the tensors that the model's passes keep.

A layer keeps the following numbers per token for its backward pass. E is the hidden size, A = heads * head_dim,
C = kv_heads * head_dim, and I is the intermediate size.

    each of two norms       E input, E output
    norms of heads          A + C inputs; only with has_qk_norm
    attention               A rotated queries, C rotated keys, C values, A outputs; without a kernel for all
                            segments, all in float32, and A concatenated outputs in addition
    MLP                     4 I: gate, its activation, up, their product; with experts, times the selected experts

The scales of norms and the log-sum-exp of attention are small. The backward pass needs 2 I + 2 E more for gradients,
before it frees the tensors above. tests/analysis/planning compares these numbers with the tensors of real passes.
"""

from typing import NamedTuple

from asterism.configs.schema.learner_config import Checkpointing
from asterism.engine.hf.model_config import DecoderConfig
from asterism.policies.losses.logits_chunks import EAGER_LOGITS, FUSED_LOGITS, count_chunk_tokens

FLOAT32_BYTES = 4


class LayerActivations(NamedTuple):
    """Activation bytes of one layer, per token."""

    kept: float  # kept from the forward to the backward pass
    recomputed: float  # recomputed in the backward pass, in addition
    gradients: float  # gradients in the backward pass, beyond the tensors that the pass has freed


class ActivationMemory(NamedTuple):
    """Activation bytes of one micro batch."""

    layers: float
    recomputed: float
    gradients: float
    ends: float  # the last norm, the scored hidden states, tables of the rotary embedding
    logits: float  # logits of one chunk in its forward or backward pass, and the gradient of the hidden states

    @property
    def at_last_layer(self) -> float:
        """Bytes in the backward pass of the last layer, while all other layers still hold their activations."""
        return self.layers + self.ends + self.recomputed + self.gradients


def compute_layer_activations(
    config: DecoderConfig,
    value_bytes: int,
    checkpointing: Checkpointing,
    *,
    has_packed_kernel: bool,
    is_compiled: bool = False,
) -> LayerActivations:
    """Compute the activation bytes of a layer. `value_bytes`: size of a number in the learner's dtype.

    `has_packed_kernel`: whether one kernel computes the attention of all segments (GPU, 16 bits). `is_compiled`: a
    selective checkpoint is inside of each compiled part, so that attention keeps its inputs (engine/model/causal_lm.py).
    """
    width, heads = config.hidden_size, config.num_heads * config.head_dim
    kv_heads = config.num_kv_heads * config.head_dim
    inner, dispatched = _count_mlp_values(config)
    norms = value_bytes * 4 * width
    statistics = FLOAT32_BYTES * (2 + config.num_heads)
    if config.architecture.has_qk_norm:
        statistics += FLOAT32_BYTES * (config.num_heads + config.num_kv_heads)
        norms += value_bytes * (heads + kv_heads)
    attended_bytes = value_bytes if has_packed_kernel else FLOAT32_BYTES
    attention = attended_bytes * 2 * (heads + kv_heads) + (0 if has_packed_kernel else value_bytes * heads)
    everything = norms + attention + statistics + value_bytes * (4 * inner + dispatched)
    gradients = value_bytes * (2 * inner + 2 * width)
    match checkpointing:
        case "none":
            return LayerActivations(everything, 0.0, gradients)
        case "selective":
            kept = value_bytes * (width + _count_kept_products(config)) + attended_bytes * heads
            kept += FLOAT32_BYTES * config.num_heads
            if is_compiled:
                kept += attended_bytes * (heads + 2 * kv_heads) - value_bytes * _count_dropped_products(config)
            return LayerActivations(kept, max(0.0, everything - kept), gradients)
        case "attention":
            kept = value_bytes * width + attended_bytes * heads + FLOAT32_BYTES * config.num_heads
            return LayerActivations(kept, max(0.0, everything - kept), gradients)
        case "full":
            return LayerActivations(value_bytes * width, everything, gradients)


def _count_kept_products(config: DecoderConfig) -> int:
    """Count the product values that selective checkpointing keeps (engine/model/recomputation.py), without experts."""
    width, inner = config.hidden_size, config.intermediate_size
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    products = [(heads, width)]  # (inputs, outputs) of each product
    if not config.architecture.has_qkv_bias:
        products += [(width, heads), (width, kv_heads), (width, kv_heads)]
    if config.experts is None:
        products += [(width, inner), (width, inner), (inner, width)]
    return sum(outputs for inputs, outputs in products if outputs <= inputs)


def _count_dropped_products(config: DecoderConfig) -> int:
    """Count values that a compiled part drops because its backward pass does not read them: v, and the last product."""
    v = 0 if config.architecture.has_qkv_bias else config.num_kv_heads * config.head_dim
    is_narrow = config.experts is None and config.hidden_size <= config.intermediate_size
    return v + (config.hidden_size if is_narrow else 0)


def _count_mlp_values(config: DecoderConfig) -> tuple[int, int]:
    """Return the largest layer's inner values per token, and the values of its token copies for experts."""
    experts = config.experts
    if experts is None:
        return config.intermediate_size, 0
    inner = experts.experts_per_token * experts.expert_size
    return max(inner, config.intermediate_size if experts.dense_layers else 0), 3 * experts.experts_per_token * (
        config.hidden_size
    )


def compute_activation_memory(
    config: DecoderConfig,
    tokens: int,
    value_bytes: int,
    checkpointing: Checkpointing,
    *,
    has_packed_kernel: bool,
    has_entropy_gradient: bool = False,
    is_compiled: bool = False,
) -> ActivationMemory:
    """Compute the memory of a micro batch in which each token is scored. `is_compiled` includes a GPU's head."""
    layer = compute_layer_activations(
        config, value_bytes, checkpointing, has_packed_kernel=has_packed_kernel, is_compiled=is_compiled
    )
    if has_packed_kernel:
        logits = (FUSED_LOGITS if is_compiled else EAGER_LOGITS).count_gpu_bytes(config.vocab_size, tokens)
    else:
        logits = _compute_logits_memory(config.vocab_size, tokens, value_bytes, has_entropy_gradient)
    end = 2 * value_bytes * (config.hidden_size + config.head_dim)
    return ActivationMemory(
        layers=tokens * layer.kept * config.num_layers,
        recomputed=tokens * layer.recomputed,
        gradients=tokens * layer.gradients,
        ends=tokens * end,
        logits=logits + tokens * value_bytes * config.hidden_size,
    )


def _compute_logits_memory(vocab_size: int, tokens: int, value_bytes: int, has_entropy_gradient: bool) -> float:
    """Compute three float32 tensors: log probabilities, probabilities, and gradients or summands of the entropy."""
    chunk = min(tokens, count_chunk_tokens(vocab_size))
    factors = FLOAT32_BYTES if has_entropy_gradient else 0
    computed = value_bytes if value_bytes < FLOAT32_BYTES else 0  # the logits before their conversion
    return chunk * vocab_size * (EAGER_LOGITS.bytes_per_logit + factors + computed)

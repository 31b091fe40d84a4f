"""Memory of activations of a micro batch in the learner, by the tensors that the model's passes keep.

A layer keeps for its backward pass, per token, with E hidden size, A = heads * head_dim, C = kv_heads * head_dim, I
intermediate size, in numbers:

    each of two norms       E input, E output
    norms of heads          A + C inputs; only with has_qk_norm
    attention               A queries and C keys after the rotation, C values, A outputs; where no kernel computes all
                            segments, in float32, and A outputs that are concatenated
    MLP                     4 I: gate, its activation, up, their product; with experts for each selected expert

Small: the scales of norms and the log-sum-exp of attention. Its backward pass then needs 2 I + 2 E for gradients, before it
frees the tensors above. tests/analysis/planning compares these numbers with the tensors of real passes.
"""

from typing import NamedTuple

from asterism.configs.schema.learner_config import Checkpointing
from asterism.engine.model.model_config import DecoderConfig
from asterism.policies.losses.logits_chunks import EAGER_LOGITS, FUSED_LOGITS, count_chunk_tokens

FLOAT32_BYTES = 4


class LayerActivations(NamedTuple):
    """Bytes per token."""

    kept: float  # of a layer, from the forward to the backward pass
    recomputed: float  # of the layer in its backward pass, in addition
    gradients: float  # of the layer in its backward pass, beyond the tensors that the pass has freed


class ActivationMemory(NamedTuple):
    """Bytes of one micro batch."""

    layers: float
    recomputed: float
    gradients: float
    ends: float  # the last norm, the scored hidden states, tables of the rotary embedding
    logits: float  # of one chunk in its forward or backward pass, and the gradient of the hidden states

    @property
    def at_logits(self) -> float:
        """When the last chunk of logits is computed."""
        return self.layers + self.ends + self.logits

    @property
    def at_last_layer(self) -> float:
        """In the backward pass of the last layer, when all others still hold their activations."""
        return self.layers + self.ends + self.recomputed + self.gradients


def compute_layer_activations(
    config: DecoderConfig,
    value_bytes: int,
    checkpointing: Checkpointing,
    *,
    has_packed_kernel: bool,
    is_compiled: bool = False,
) -> LayerActivations:
    """`value_bytes`: of a number in the learner's dtype.

    `has_packed_kernel`: whether one kernel computes the attention of all segments: on GPUs in 16 bits. `is_compiled`: a
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
    """Values of the products that selective checkpointing keeps (engine/model/recomputation.py); none of experts."""
    width, inner = config.hidden_size, config.intermediate_size
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    products = [(heads, width)]  # sizes of a row of the input and of the output
    if not config.architecture.has_qkv_bias:
        products += [(width, heads), (width, kv_heads), (width, kv_heads)]
    if config.experts is None:
        products += [(width, inner), (width, inner), (inner, width)]
    return sum(outputs for inputs, outputs in products if outputs <= inputs)


def _count_dropped_products(config: DecoderConfig) -> int:
    """Values that a compiled part does not keep, because its backward pass does not read them: v, and the last product."""
    v = 0 if config.architecture.has_qkv_bias else config.num_kv_heads * config.head_dim
    is_narrow = config.experts is None and config.hidden_size <= config.intermediate_size
    return v + (config.hidden_size if is_narrow else 0)


def _count_mlp_values(config: DecoderConfig) -> tuple[int, int]:
    """Inner values per token, and those of the copies of tokens for their experts: of the largest layer."""
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
    """Compute the memory of a micro batch in which each token is scored. `is_compiled`: the layers, and the head of a GPU."""
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
    """Three tensors in float32: log probabilities, probabilities, and their gradient or the summands of the entropy."""
    chunk = min(tokens, count_chunk_tokens(vocab_size))
    factors = FLOAT32_BYTES if has_entropy_gradient else 0
    computed = value_bytes if value_bytes < FLOAT32_BYTES else 0  # the logits before their conversion
    return chunk * vocab_size * (EAGER_LOGITS.bytes_per_logit + factors + computed)

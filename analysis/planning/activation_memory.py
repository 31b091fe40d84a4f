"""Memory of activations of a micro batch in the learner, by the tensors that the model's passes keep.

A layer keeps for its backward pass, per token, with E hidden size, A = heads * head_dim, C = kv_heads * head_dim, I
intermediate size, in numbers:

    each of two norms       E input, E output; on a CPU, where the norm is not one kernel, the input and its normalized
                            value in float32, and the output
    norms of heads          A + C inputs, in float32 with the normalized values on a CPU; only with has_qk_norm
    attention               A queries and C keys after the rotation, C values, A outputs
    MLP                     4 I: gate, its activation, up, their product; with experts for each selected expert

Small: the scales of norms and the log-sum-exp of attention. Its backward pass then needs 2 I + 2 E for gradients, before it
frees the tensors above. tests/analysis/planning compares these numbers with the tensors of real passes.
"""

from typing import Literal, NamedTuple

from engine.model.model_config import DecoderConfig

Checkpointing = Literal["none", "selective", "full"]

FLOAT32_BYTES = 4
LOGITS_PER_CHUNK = 1 << 25  # policies.losses.token_scores.MAX_LOGITS_PER_CHUNK


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
    logits: float  # of one chunk, during its forward pass or its recomputation

    @property
    def at_logits(self) -> float:
        """When the last chunk of logits is computed."""
        return self.layers + self.ends + self.logits

    @property
    def at_last_layer(self) -> float:
        """In the backward pass of the last layer, when all others still hold their activations."""
        return self.layers + self.ends + self.recomputed + self.gradients


def compute_layer_activations(
    config: DecoderConfig, value_bytes: int, checkpointing: Checkpointing, *, has_fused_norm: bool
) -> LayerActivations:
    """`value_bytes`: of a number in the learner's dtype. `has_fused_norm`: on GPUs."""
    width, heads = config.hidden_size, config.num_heads * config.head_dim
    kv_heads = config.num_kv_heads * config.head_dim
    inner, dispatched = _count_mlp_values(config)
    # Bytes that a norm keeps of its input: the input, or in float32 the input and the normalized value.
    norm_input = value_bytes if has_fused_norm else 2 * FLOAT32_BYTES
    norms = 2 * width * (norm_input + value_bytes)
    statistics = FLOAT32_BYTES * (2 + config.num_heads)
    if config.architecture.has_qk_norm:
        statistics += FLOAT32_BYTES * (config.num_heads + config.num_kv_heads)
        norms += (heads + kv_heads) * norm_input
    attention = value_bytes * 2 * (heads + kv_heads)
    everything = norms + attention + statistics + value_bytes * (4 * inner + dispatched)
    gradients = value_bytes * (2 * inner + 2 * width)
    match checkpointing:
        case "none":
            return LayerActivations(everything, 0.0, gradients)
        case "selective":
            # Inputs of the two blocks, results of all products and of attention.
            kept = value_bytes * (2 * width + 2 * (heads + kv_heads) + 2 * inner + dispatched)
            return LayerActivations(kept, max(0.0, everything - kept), gradients)
        case "full":
            return LayerActivations(value_bytes * width, everything, gradients)


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
    has_fused_norm: bool,
    has_entropy_gradient: bool = False,
) -> ActivationMemory:
    """Of a micro batch in which each token is scored."""
    layer = compute_layer_activations(config, value_bytes, checkpointing, has_fused_norm=has_fused_norm)
    norm_input = value_bytes if has_fused_norm else 2 * FLOAT32_BYTES
    end = config.hidden_size * (norm_input + value_bytes) + 2 * value_bytes * config.head_dim
    return ActivationMemory(
        layers=tokens * layer.kept * config.num_layers,
        recomputed=tokens * layer.recomputed,
        gradients=tokens * layer.gradients,
        ends=tokens * end,
        logits=_compute_logits_memory(config.vocab_size, tokens, value_bytes, has_entropy_gradient),
    )


def _compute_logits_memory(vocab_size: int, tokens: int, value_bytes: int, has_entropy_gradient: bool) -> float:
    """Four tensors in float32: logits, log probabilities, probabilities and the summands of the entropy."""
    chunk = min(tokens, max(1, LOGITS_PER_CHUNK // vocab_size))
    copies = 6 if has_entropy_gradient else 4
    computed = value_bytes if value_bytes < FLOAT32_BYTES else 0  # the logits before their conversion
    return chunk * vocab_size * (copies * FLOAT32_BYTES + computed)

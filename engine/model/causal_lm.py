"""The decoder-only architectures of engine/model/architectures.py for training, with transformers' parameter names.

The embedded engine decodes with the same weights (engine/inference/decoder.py). Tests compare both
with transformers.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from configs.algorithm import Checkpointing
from engine.model.compiled_parts import run_compiled, run_eagerly
from engine.model.experts import SparseMlp
from engine.model.layers import Attention, Mlp, RmsNorm, UninitializedEmbedding, UninitializedLinear
from engine.model.model_config import DecoderConfig
from engine.model.packed_attention import Segments, attend
from engine.model.recomputation import run_recomputed
from engine.model.rope import compute_rope_tables
from policies.losses.token_scores import ScoredTokens, TokenScores, compute_token_scores


class DecoderLayer(nn.Module):
    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        width = config.hidden_size
        self.self_attn = Attention(config)
        if config.experts is not None and config.has_experts(layer):
            self.mlp = SparseMlp(width, config.experts)
        else:
            self.mlp = Mlp(width, config.intermediate_size)
        self.input_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)

        self.recomputed: Checkpointing = "none"  # in the backward pass, to save memory
        self.is_compiled = False

    def forward(self, x_BTE: Tensor, cos: Tensor, sin: Tensor, segments: Segments | None) -> Tensor:
        """FSDP gathers the parameters for the backward pass before this module recomputes activations."""
        return run_recomputed(self.recomputed, self._compute, x_BTE, cos, sin, segments)

    def _compute(self, x_BTE: Tensor, cos: Tensor, sin: Tensor, segments: Segments | None) -> Tensor:
        """The lengths of segments are Python numbers, for which compiled attention would be compiled each time."""
        run = run_compiled if self.is_compiled else run_eagerly
        q_BTHD, k_BTKD, v_BTKD = run(DecoderLayer.project, self, x_BTE, cos, sin)
        out_BTHD = attend(q_BTHD, k_BTKD, v_BTKD, segments)
        if isinstance(self.mlp, SparseMlp):  # reads how many tokens each expert has
            run = run_eagerly
        return run(DecoderLayer.finish, self, x_BTE, out_BTHD)

    def project(self, x_BTE: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The part before attention: queries, keys and values."""
        return self.self_attn.project(self.input_layernorm(x_BTE), cos, sin)

    def finish(self, x_BTE: Tensor, out_BTHD: Tensor) -> Tensor:
        """The part after attention."""
        x_BTE = x_BTE + self.self_attn.o_proj(out_BTHD.flatten(2))
        return x_BTE + self.mlp(self.post_attention_layernorm(x_BTE))


class Backbone(nn.Module):
    """All layers except the output matrix, as a module for the name prefix `model.`."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = UninitializedEmbedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([DecoderLayer(config, layer) for layer in range(config.num_layers)])
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, token_ids_BT: Tensor, positions_BT: Tensor, segments: Segments | None) -> Tensor:
        x_BTE = self.embed_tokens(token_ids_BT)
        tables = compute_rope_tables(positions_BT, self.config)
        cos, sin = (table.to(x_BTE.dtype).unsqueeze(2) for table in tables)
        for layer in self.layers:
            x_BTE = layer(x_BTE, cos, sin, segments)
        return self.norm(x_BTE)


class OutputHead(UninitializedLinear):
    """The output matrix of an untied model. A call computes scores: FSDP gathers the matrix once for all their chunks."""

    def forward(self, hidden_NE: Tensor, tokens: ScoredTokens) -> TokenScores:  # pyright: ignore[reportIncompatibleMethodOverride]
        return score_tokens(hidden_NE, self.weight, tokens)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return functional.linear(hidden, self.weight)


class CausalLM(nn.Module):
    """The weights are uninitialized until `initialize_weights`, `load_state_dict` or `fill_parameters`."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Backbone(config)
        head_sizes = config.hidden_size, config.vocab_size
        self.lm_head = None if config.tie_word_embeddings else OutputHead(*head_sizes, bias=False)

    def forward(
        self,
        token_ids_BT: Tensor,
        positions_BT: Tensor | None = None,
        tokens: ScoredTokens | None = None,
        segments: Segments | None = None,
    ) -> Tensor | TokenScores:
        """Hidden states after the last norm, [B, T, E], or the scores of `tokens`.

        Each row is a sequence and may be right-padded; with `segments`, the only row contains several sequences.
        A sharded model (engine.learner.sharding) has its output matrix only during this call.
        """
        if segments is not None:
            positions_BT = segments.positions_T[None]
        elif positions_BT is None:
            positions_BT = torch.arange(token_ids_BT.shape[1], device=token_ids_BT.device)[None]
        hidden_BTE = self.model(token_ids_BT, positions_BT, segments)
        if tokens is None:
            return hidden_BTE
        hidden_NE = hidden_BTE.flatten(0, 1).index_select(0, tokens.positions_N)
        if self.lm_head is not None:
            return self.lm_head(hidden_NE, tokens)
        return score_tokens(hidden_NE, self.model.embed_tokens.weight, tokens)

    def set_recomputed(self, recomputed: Checkpointing) -> None:
        """Which activations of the layers the backward pass recomputes."""
        for layer in self.model.layers:
            assert isinstance(layer, DecoderLayer)
            layer.recomputed = recomputed

    def set_compiled(self, is_compiled: bool) -> None:
        """Whether torch.compile compiles the layers without their attention and experts: engine/model/compiled_parts.py."""
        for layer in self.model.layers:
            assert isinstance(layer, DecoderLayer)
            layer.is_compiled = is_compiled

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[..., E] -> [..., V], for whole models."""
        if self.lm_head is not None:
            return self.lm_head.compute_logits(hidden)
        return functional.linear(hidden, self.model.embed_tokens.weight)


def score_tokens(hidden_NE: Tensor, weight_VE: Tensor, tokens: ScoredTokens) -> TokenScores:
    return compute_token_scores(
        hidden_NE, weight_VE, tokens.targets_N, tokens.temperature, entropy_gradient=tokens.entropy_gradient
    )


def initialize_weights(model: CausalLM, seed: int, std: float = 0.02) -> None:
    """Initial weights as in transformers: matrices from N(0, std), norms 1, biases 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(0.0 if name.endswith(".bias") else 1.0)
            else:
                parameter.copy_(torch.empty(parameter.shape).normal_(0.0, std, generator=generator))

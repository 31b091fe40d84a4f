"""The Qwen3 architecture for training, with the parameter names of transformers' Qwen3ForCausalLM.

The embedded engine decodes with the same weights (engine/inference/decoder.py). Tests compare both
with transformers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.model.model_config import Qwen3Config
from policies.losses.token_scores import ScoredTokens, TokenScores, compute_token_scores


class RmsNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalizes the last dimension, in float32 or wider."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * scaled.to(x.dtype)


class UninitializedLinear(nn.Linear):
    def reset_parameters(self) -> None:
        """Does nothing: weights are set later, and the default takes seconds on meta tensors."""


class UninitializedEmbedding(nn.Embedding):
    def reset_parameters(self) -> None:
        """Does nothing, as in UninitializedLinear."""


def compute_rope_tables(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine, float32 [*positions.shape, head_dim], equal halves (arXiv 2104.09864)."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    angles = positions[..., None].float() * (1.0 / theta**exponents)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates x [..., head_dim]; dimension i of the first half pairs with i of the second."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Qwen3Attention(nn.Module):
    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        width, head_dim = config.hidden_size, config.head_dim
        self.head_dim = head_dim
        self.q_proj = UninitializedLinear(width, config.num_heads * head_dim, bias=False)
        self.k_proj = UninitializedLinear(width, config.num_kv_heads * head_dim, bias=False)
        self.v_proj = UninitializedLinear(width, config.num_kv_heads * head_dim, bias=False)
        self.o_proj = UninitializedLinear(config.num_heads * head_dim, width, bias=False)
        self.q_norm = RmsNorm(head_dim, config.rms_norm_eps)
        self.k_norm = RmsNorm(head_dim, config.rms_norm_eps)

    def forward(self, x_BTE: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Causal over T. cos and sin are [B or 1, 1, T, head_dim]."""
        heads = (*x_BTE.shape[:-1], -1, self.head_dim)
        q_BHTD = self.q_norm(self.q_proj(x_BTE).view(heads)).transpose(1, 2)
        k_BKTD = self.k_norm(self.k_proj(x_BTE).view(heads)).transpose(1, 2)
        v_BKTD = self.v_proj(x_BTE).view(heads).transpose(1, 2)
        q_BHTD, k_BKTD = apply_rope(q_BHTD, cos, sin), apply_rope(k_BKTD, cos, sin)
        out_BHTD = functional.scaled_dot_product_attention(q_BHTD, k_BKTD, v_BKTD, is_causal=True, enable_gqa=True)
        return self.o_proj(out_BHTD.transpose(1, 2).flatten(2))


class Qwen3Mlp(nn.Module):
    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.gate_proj = UninitializedLinear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = UninitializedLinear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = UninitializedLinear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Qwen3DecoderLayer(nn.Module):
    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.self_attn = Qwen3Attention(config)
        self.mlp = Qwen3Mlp(config)
        self.input_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x_BTE: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x_BTE = x_BTE + self.self_attn(self.input_layernorm(x_BTE), cos, sin)
        return x_BTE + self.mlp(self.post_attention_layernorm(x_BTE))


class Qwen3Backbone(nn.Module):
    """All layers except the output matrix, as a module for the name prefix `model.`."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = UninitializedEmbedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([Qwen3DecoderLayer(config) for _ in range(config.num_layers)])
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, token_ids_BT: Tensor, positions_BT: Tensor) -> Tensor:
        x_BTE = self.embed_tokens(token_ids_BT)
        tables = compute_rope_tables(positions_BT, self.config.head_dim, self.config.rope_theta)
        cos, sin = (table.to(x_BTE.dtype).unsqueeze(1) for table in tables)
        for layer in self.layers:
            x_BTE = layer(x_BTE, cos, sin)
        return self.norm(x_BTE)


class OutputHead(UninitializedLinear):
    """The output matrix of an untied model. A call computes scores: FSDP gathers the matrix once for all their chunks."""

    def forward(self, hidden_NE: Tensor, tokens: ScoredTokens) -> TokenScores:  # pyright: ignore[reportIncompatibleMethodOverride]
        return score_tokens(hidden_NE, tokens, self.compute_logits, self.out_features)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return functional.linear(hidden, self.weight)


class Qwen3(nn.Module):
    """The weights are uninitialized until `initialize_weights`, `load_state_dict` or `fill_parameters`."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.config = config
        self.model = Qwen3Backbone(config)
        head_sizes = config.hidden_size, config.vocab_size
        self.lm_head = None if config.tie_word_embeddings else OutputHead(*head_sizes, bias=False)

    def forward(
        self, token_ids_BT: Tensor, positions_BT: Tensor | None = None, tokens: ScoredTokens | None = None
    ) -> Tensor | TokenScores:
        """Hidden states after the last norm, [B, T, E], or the scores of `tokens`. Rows may be right-padded.

        A sharded model (engine.learner.sharding) has its output matrix only during this call.
        """
        if positions_BT is None:
            positions_BT = torch.arange(token_ids_BT.shape[1], device=token_ids_BT.device)[None]
        hidden_BTE = self.model(token_ids_BT, positions_BT)
        if tokens is None:
            return hidden_BTE
        hidden_NE = hidden_BTE.flatten(0, 1).index_select(0, tokens.positions_N)
        if self.lm_head is not None:
            return self.lm_head(hidden_NE, tokens)
        return score_tokens(hidden_NE, tokens, self.compute_logits, self.config.vocab_size)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[..., E] -> [..., V], for whole models."""
        if self.lm_head is not None:
            return self.lm_head.compute_logits(hidden)
        return functional.linear(hidden, self.model.embed_tokens.weight)


def score_tokens(
    hidden_NE: Tensor, tokens: ScoredTokens, compute_logits: Callable[[Tensor], Tensor], vocab_size: int
) -> TokenScores:
    return compute_token_scores(
        hidden_NE,
        tokens.targets_N,
        compute_logits,
        vocab_size,
        tokens.temperature,
        entropy_gradient=tokens.entropy_gradient,
    )


def initialize_weights(model: Qwen3, seed: int, std: float = 0.02) -> None:
    """Initial weights as in transformers: matrices from N(0, std), norms 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.copy_(torch.empty(parameter.shape).normal_(0.0, std, generator=generator))

"""The parts of a decoder layer for training, with transformers' parameter names: norm, attention and MLP."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.model.model_config import DecoderConfig
from engine.model.rope import apply_rope


class RmsNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalizes the last dimension, in float32 or wider."""
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


class UninitializedLinear(nn.Linear):
    def reset_parameters(self) -> None:
        """Does nothing: weights are set later, and the default takes seconds on meta tensors."""


class UninitializedEmbedding(nn.Embedding):
    def reset_parameters(self) -> None:
        """Does nothing, as in UninitializedLinear."""


class Attention(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        width, head_dim, bias = config.hidden_size, config.head_dim, config.architecture.has_qkv_bias
        self.head_dim = head_dim
        self.q_proj = UninitializedLinear(width, config.num_heads * head_dim, bias=bias)
        self.k_proj = UninitializedLinear(width, config.num_kv_heads * head_dim, bias=bias)
        self.v_proj = UninitializedLinear(width, config.num_kv_heads * head_dim, bias=bias)
        self.o_proj = UninitializedLinear(config.num_heads * head_dim, width, bias=False)
        has_norms = config.architecture.has_qk_norm
        self.q_norm = RmsNorm(head_dim, config.rms_norm_eps) if has_norms else nn.Identity()
        self.k_norm = RmsNorm(head_dim, config.rms_norm_eps) if has_norms else nn.Identity()

    def forward(self, x_BTE: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Causal over T. cos and sin are [B or 1, 1, T, head_dim]."""
        heads = (*x_BTE.shape[:-1], -1, self.head_dim)
        q_BHTD = self.q_norm(self.q_proj(x_BTE).view(heads)).transpose(1, 2)
        k_BKTD = self.k_norm(self.k_proj(x_BTE).view(heads)).transpose(1, 2)
        v_BKTD = self.v_proj(x_BTE).view(heads).transpose(1, 2)
        q_BHTD, k_BKTD = apply_rope(q_BHTD, cos, sin), apply_rope(k_BKTD, cos, sin)
        out_BHTD = functional.scaled_dot_product_attention(q_BHTD, k_BKTD, v_BKTD, is_causal=True, enable_gqa=True)
        return self.o_proj(out_BHTD.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = UninitializedLinear(width, inner, bias=False)
        self.up_proj = UninitializedLinear(width, inner, bias=False)
        self.down_proj = UninitializedLinear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))

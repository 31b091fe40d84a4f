"""The parts of a decoder layer for training, with transformers' parameter names: norm, attention and MLP.

Each part converts its parameters to the dtype of its input. So a model with float32 parameters can compute in bfloat16
(CausalLM.set_compute_dtype); the gradients of its parameters are float32.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import Function
from torch.nn import functional

from asterism.engine.hf.model_config import DecoderConfig
from asterism.engine.model.rope import apply_rope


class RmsNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dimension, in float32 or wider."""
        weight = self.weight.to(x.dtype)
        if x.is_cuda or torch.compiler.is_compiling():
            return functional.rms_norm(x, weight.shape, weight, self.eps)
        found: Tensor = _CpuRmsNorm.apply(x, weight, self.eps)  # pyright: ignore[reportAssignmentType]
        return found


class _CpuRmsNorm(Function):
    """An RMS norm for CPUs. torch's own norm makes twice as many passes over memory unless it is compiled."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        exact = x.to(torch.promote_types(x.dtype, torch.float32))
        squares = torch.linalg.vecdot(exact, exact).div_(x.shape[-1])
        inverse = squares.add_(eps).rsqrt_().unsqueeze(-1)
        ctx.save_for_backward(x, weight, inverse)
        return (exact * inverse).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Compute dx = r w g - x r^3 (w g . x) / n and dw = sum(r g x), with the inverse root r and the size n."""
        x, weight, inverse = ctx.saved_tensors
        gradient, exact = gradients[0].to(inverse.dtype), x.to(inverse.dtype)
        products = (gradient * exact).reshape(-1, x.shape[-1])
        projections = torch.mv(products, weight.to(inverse.dtype)).view_as(inverse)
        x_gradient = (gradient * weight).mul_(inverse)
        x_gradient.addcmul_(exact, projections.mul_(inverse**3), value=-1.0 / x.shape[-1])
        return x_gradient.to(x.dtype), torch.mv(products.t(), inverse.flatten()).to(weight.dtype), None


class UninitializedLinear(nn.Linear):
    def reset_parameters(self) -> None:
        """Do nothing: weights are set later, and the default initialization takes seconds on meta tensors."""

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        bias = None if self.bias is None else self.bias.to(x.dtype)  # pyright: ignore[reportUnnecessaryComparison] - torch's types omit None
        return functional.linear(x, self.weight.to(x.dtype), bias)


class UninitializedEmbedding(nn.Embedding):
    def reset_parameters(self) -> None:
        """Do nothing, as in UninitializedLinear."""


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

    def project(self, x_BTE: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated queries and keys, and values. cos and sin are [B or 1, T, 1, head_dim]."""
        heads = (*x_BTE.shape[:-1], -1, self.head_dim)
        q_BTHD = apply_rope(self.q_norm(self.q_proj(x_BTE).view(heads)), cos, sin)
        k_BTKD = apply_rope(self.k_norm(self.k_proj(x_BTE).view(heads)), cos, sin)
        return q_BTHD, k_BTKD, self.v_proj(x_BTE).view(heads)


class Mlp(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = UninitializedLinear(width, inner, bias=False)
        self.up_proj = UninitializedLinear(width, inner, bias=False)
        self.down_proj = UninitializedLinear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))

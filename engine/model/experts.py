"""A layer of experts: a router selects K of X experts for each token; grouped matrix products compute their outputs.

The weights keep transformers' names in checkpoints, one matrix per expert. The learner stacks them in each pass; the
embedded engine stores them stacked (engine/inference/fused_weights.py). N tokens make S = N * K pairs (token, expert),
sorted by expert.
"""

from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import Function
from torch.nn import functional

from asterism.engine.hf.model_config import ExpertsConfig
from asterism.engine.model.layers import Mlp, UninitializedLinear

_MIN_CAPABILITY = (9, 0)  # from this compute capability on, grouped products need no synchronization with the CPU
_ALIGNMENT_BYTES = 16  # alignment of rows in grouped products


class Routing(NamedTuple):
    weights_NK: Tensor  # weights of the selected experts' outputs
    order_S: Tensor  # the pairs, numbered token * K + choice, sorted by expert
    ends_X: Tensor  # int32: end of each expert's pairs in order_S

    def gather(self, x_NE: Tensor) -> Tensor:
        """Return the row of each pair's token, [S, E]."""
        return x_NE[self.order_S // self.weights_NK.shape[1]]

    def combine(self, out_SE: Tensor) -> Tensor:
        """Return the weighted sum of each token's outputs, [N, E]. All devices sum in the same order."""
        unsorted_SE = torch.empty_like(out_SE).index_copy(0, self.order_S, out_SE)
        outputs_NKE = unsorted_SE.unflatten(0, self.weights_NK.shape)
        return (outputs_NKE * self.weights_NK.to(out_SE.dtype)[..., None]).sum(1)

    def count_tokens(self) -> Tensor:
        """Return the number of pairs of each expert, int64 [X]."""
        return self.ends_X.long().diff(prepend=self.ends_X.new_zeros(1).long())


def route(logits_NX: Tensor, config: ExpertsConfig) -> Routing:
    """Select experts by a float32 softmax over all experts; `config` selects whether their weights are normalized."""
    weights_NK, experts_NK = logits_NX.softmax(-1, dtype=torch.float32).topk(config.experts_per_token)
    if config.normalizes_weights:
        weights_NK = weights_NK / weights_NK.sum(-1, keepdim=True)
    experts_S, order_S = experts_NK.flatten().sort(stable=True)
    numbers_X = torch.arange(config.num_experts, device=experts_S.device)
    ends_X = torch.searchsorted(experts_S, numbers_X, right=True, out_int32=True)
    return Routing(weights_NK, order_S, ends_X)


# ---------------------------------------------------------------- grouped products


def supports_grouped_mm(device: torch.device, dtype: torch.dtype, sizes: Collection[int]) -> bool:
    """Return whether torch has a kernel for grouped products. Without it, each product synchronizes with the CPU.

    `sizes`: row lengths of the operands.
    """
    if device.type != "cuda" or dtype != torch.bfloat16 or not hasattr(functional, "grouped_mm"):
        return False
    is_aligned = all(size * dtype.itemsize % _ALIGNMENT_BYTES == 0 for size in sizes)
    return is_aligned and torch.cuda.get_device_capability(device) >= _MIN_CAPABILITY


def multiply_grouped(x_SI: Tensor, weights_XIO: Tensor, ends_X: Tensor) -> Tensor:
    """Multiply each expert's rows by its matrix; [S, O]."""
    if _uses_kernel(x_SI, weights_XIO):
        return functional.grouped_mm(x_SI, weights_XIO, offs=ends_X)
    out_SO = x_SI.new_empty(len(x_SI), weights_XIO.shape[2])
    for expert, rows in _list_rows(ends_X):
        torch.mm(x_SI[rows], weights_XIO[expert], out=out_SO[rows])
    return out_SO


def _multiply_transposed(x_SI: Tensor, y_SO: Tensor, ends_X: Tensor) -> Tensor:
    """Multiply each expert's transposed rows of x by its rows of y; [X, I, O], zeros for an expert without rows."""
    if _uses_kernel(x_SI, y_SO):
        return functional.grouped_mm(x_SI.t(), y_SO, offs=ends_X)
    out_XIO = x_SI.new_zeros(len(ends_X), x_SI.shape[1], y_SO.shape[1])
    for expert, rows in _list_rows(ends_X):
        torch.mm(x_SI[rows].t(), y_SO[rows], out=out_XIO[expert])
    return out_XIO


def _uses_kernel(*operands: Tensor) -> bool:
    sizes = [size for operand in operands for size in operand.shape[1:]]
    return len(operands[0]) > 0 and supports_grouped_mm(operands[0].device, operands[0].dtype, sizes)


def _list_rows(ends_X: Tensor) -> list[tuple[int, slice]]:
    """Return each expert that has rows, with the slice of its rows."""
    ends: list[int] = [0, *ends_X.tolist()]
    return [(expert, slice(*bounds)) for expert, bounds in enumerate(pairwise(ends)) if bounds[0] < bounds[1]]


class _GroupedLinear(Function):
    """A grouped product that saves each expert's matrix for the backward pass, not the stacked copy of all matrices.

    If the weights have another dtype than x, the products have x's dtype. Experts without tokens get gradients of
    zero, so that all ranks reduce the gradients of the same parameters.
    """

    @staticmethod
    def forward(ctx: Any, x_SI: Tensor, ends_X: Tensor, *weights_OI: Tensor) -> Tensor:
        ctx.save_for_backward(x_SI, ends_X, *weights_OI)
        return multiply_grouped(x_SI, _stack_as(x_SI, weights_OI).transpose(1, 2), ends_X)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x_SI, ends_X, *weights_OI = ctx.saved_tensors
        gradient_SO: Tensor = gradients[0].contiguous()
        x_gradient = multiply_grouped(gradient_SO, _stack_as(x_SI, weights_OI), ends_X)
        if not ctx.needs_input_grad[2]:  # the experts are frozen: only attention has adapters
            return x_gradient, None, *(None for _ in weights_OI)
        gradients_XOI = _multiply_transposed(gradient_SO, x_SI, ends_X)
        # This converts all gradients at once; autograd would convert them one by one.
        return x_gradient, None, *gradients_XOI.to(weights_OI[0].dtype).unbind()


def _apply_linear(x_SI: Tensor, layers: Sequence[nn.Linear], ends_X: Tensor) -> Tensor:
    found: Tensor = _GroupedLinear.apply(x_SI, ends_X, *(layer.weight for layer in layers))  # pyright: ignore[reportAssignmentType]
    return found


def _stack_as(x_SI: Tensor, weights_OI: Sequence[Tensor]) -> Tensor:
    """Stack the weights, [X, O, I], in the dtype of x. On a GPU, each kernel converts many matrices."""
    stacked_XOI = x_SI.new_empty(len(weights_OI), *weights_OI[0].shape)
    # torch has no public function that copies a list of tensors.
    torch._foreach_copy_(stacked_XOI.unbind(), list(weights_OI))  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
    return stacked_XOI


# ---------------------------------------------------------------- the layer


class SparseMlp(nn.Module):
    def __init__(self, width: int, config: ExpertsConfig) -> None:
        super().__init__()
        self.config = config
        self.gate = UninitializedLinear(width, config.num_experts, bias=False)
        self.experts = nn.ModuleList([Mlp(width, config.expert_size) for _ in range(config.num_experts)])
        self.tokens_per_expert: Tensor | None = None  # tokens since the last take_expert_counts

    def forward(self, x: Tensor) -> Tensor:
        x_NE = x.flatten(0, -2)
        routing = route(self.gate(x_NE), self.config)
        counts_X = routing.count_tokens()
        self.tokens_per_expert = counts_X if self.tokens_per_expert is None else self.tokens_per_expert + counts_X
        mlps: list[Mlp] = list(self.experts)  # pyright: ignore[reportAssignmentType]
        x_SE, ends_X = routing.gather(x_NE), routing.ends_X
        gate_SI = _apply_linear(x_SE, [mlp.gate_proj for mlp in mlps], ends_X)
        up_SI = _apply_linear(x_SE, [mlp.up_proj for mlp in mlps], ends_X)
        out_SE = _apply_linear(functional.silu(gate_SI) * up_SI, [mlp.down_proj for mlp in mlps], ends_X)
        return routing.combine(out_SE).view_as(x)


# ---------------------------------------------------------------- load of the experts


class ExpertLoad(NamedTuple):
    """The balance of the experts' loads. A balanced layer has max / mean = 1 and no idle expert."""

    max_over_mean: float  # tokens of the busiest expert over the mean, averaged over the layers
    worst_max_over_mean: float  # the same ratio in the most uneven layer
    idle_share: float  # share of experts without a token


def take_expert_counts(model: nn.Module) -> Tensor | None:
    """Return tokens per expert, int64 [layers with experts, X], of all passes since the last call; None without passes.

    Padding counts as tokens, and a recomputed pass counts again. Ranks sum their counts before `compute_expert_load`.
    """
    counts: list[Tensor] = []
    for module in model.modules():
        if isinstance(module, SparseMlp) and module.tokens_per_expert is not None:
            counts.append(module.tokens_per_expert)
            module.tokens_per_expert = None
    return torch.stack(counts) if counts else None


def compute_expert_load(counts_LX: Tensor) -> ExpertLoad:
    counts = counts_LX.double()
    ratios_L = counts.amax(1) / counts.mean(1).clamp(min=1e-9)
    found = torch.stack([ratios_L.mean(), ratios_L.max(), (counts_LX == 0).double().mean()])
    return ExpertLoad(*found.tolist())  # synchronizes with a GPU only once

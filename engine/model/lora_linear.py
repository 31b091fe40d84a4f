"""Low-rank adapters of projections: y = W x + (alpha / r) B A x with W frozen (LoRA, arXiv 2106.09685, section 4.1).

W keeps its name in checkpoints. The adapter of a projection has the parameters `lora_A.weight`, [r, inputs], and
`lora_B.weight`, [outputs, r], named as in peft.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from asterism.engine.model.causal_lm import CausalLM
from asterism.engine.model.layers import UninitializedLinear
from asterism.engine.model.lora_options import ATTENTION_TARGETS, LoraOptions, check_lora_targets


class LoraLinear(UninitializedLinear):
    """A frozen linear layer with an adapter. It has the parameters of the layer that it replaces."""

    def __init__(self, layer: nn.Linear, options: LoraOptions) -> None:
        has_bias = layer.bias is not None  # pyright: ignore[reportUnnecessaryComparison] - torch's types omit None
        super().__init__(layer.in_features, layer.out_features, bias=has_bias, device="meta")
        self.weight, self.bias = layer.weight, layer.bias
        device, self.options, self.is_enabled = layer.weight.device, options, True
        self.lora_A = UninitializedLinear(layer.in_features, options.rank, bias=False, device=device)
        self.lora_B = UninitializedLinear(options.rank, layer.out_features, bias=False, device=device)

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        base = super().forward(x)
        return base + self.options.scale * self.lora_B(self.lora_A(x)) if self.is_enabled else base


def add_adapters(model: CausalLM, options: LoraOptions) -> None:
    """Freeze all parameters and add adapters, before the model is sharded. Raises UnsupportedModel.

    The adapters are on the model's device and have no values yet.
    """
    check_lora_targets(model.config, options)
    model.requires_grad_(False)
    for layer in model.model.layers:
        for target in options.targets:
            block = layer.get_submodule("self_attn" if target in ATTENTION_TARGETS else "mlp")
            projection = block.get_submodule(target)
            assert isinstance(projection, nn.Linear)
            setattr(block, target, LoraLinear(projection, options))


def list_adapters(model: nn.Module) -> dict[str, LoraLinear]:
    """Return the layers with adapters by name; empty for a model without adapters."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLinear)}


def list_base_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return all parameters except the adapters' parameters."""
    adapters = list_adapter_parameters(model)
    return {name: each for name, each in model.named_parameters() if name not in adapters}


def list_adapter_parameters(model: nn.Module) -> dict[str, Tensor]:
    return {
        name_adapter(f"{name}.weight", matrix): part.weight
        for name, layer in list_adapters(model).items()
        for matrix, part in (("A", layer.lora_A), ("B", layer.lora_B))
    }


def name_adapter(weight: str, matrix: str) -> str:
    """Return the name of matrix A or B of a layer's adapter. `weight`: the name of the layer's weights."""
    return f"{weight.removesuffix('weight')}lora_{matrix}.weight"


@torch.no_grad()
def merge_rows(rows_RI: Tensor, b_RK: Tensor, a_KI: Tensor, scale: float, out: Tensor | None = None) -> Tensor:
    """Return R rows of W + (alpha / r) B A, of rank K; exactly W if B is 0. `out` can be `rows_RI`."""
    return torch.addmm(rows_RI, b_RK, a_KI, alpha=scale, out=out)

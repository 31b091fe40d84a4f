"""Tests of routing, grouped products and the load of experts. test_architectures.py compares with transformers."""

from collections.abc import Collection
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from asterism.engine.hf.model_config import ExpertsConfig
from asterism.engine.model import experts
from asterism.engine.model.experts import (
    ExpertLoad,
    SparseMlp,
    compute_expert_load,
    multiply_grouped,
    route,
    supports_grouped_mm,
    take_expert_counts,
)
from tests.engine.closeness import assert_close
from tests.engine.tiny_models import small_architecture, small_model

CONFIG = ExpertsConfig(num_experts=4, experts_per_token=2, expert_size=8)
LOGITS = torch.tensor([[3.0, 1.0, 2.0, 0.0], [0.0, 1.0, 2.0, 3.0], [5.0, 0.0, 4.0, 1.0]])


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use torch's grouped product, as on a GPU. On a CPU, it is a loop."""

    def always(device: torch.device, dtype: torch.dtype, sizes: Collection[int]) -> bool:
        return True

    monkeypatch.setattr(experts, "supports_grouped_mm", always)


def build_layer(seed: int = 0, config: ExpertsConfig = CONFIG) -> SparseMlp:
    layer = SparseMlp(16, config)
    generator = torch.Generator().manual_seed(seed)
    for parameter in layer.parameters():
        parameter.data.normal_(0.0, 0.3, generator=generator)
    return layer


def run_and_collect_gradients(layer: SparseMlp, x: Tensor) -> dict[str, Tensor]:
    """Return the output, and the gradients with respect to the input and each parameter."""
    x = x.clone().requires_grad_(True)
    out = layer(x)
    (out * torch.arange(out.numel()).view_as(out).sin()).sum().backward()
    found = {"output": out.detach(), "input": x.grad, **{name: each.grad for name, each in layer.named_parameters()}}
    return {name: each for name, each in found.items() if each is not None}


def compute_densely(layer: SparseMlp, x: Tensor) -> Tensor:
    """Compute every expert for every token, and sum the selected experts' outputs with the router's weights."""
    weights, chosen = layer.gate(x).softmax(-1).topk(layer.config.experts_per_token)
    outputs = torch.stack([expert(x) for expert in layer.experts], dim=-2)
    picked = outputs.gather(-2, chosen[..., None].expand(*chosen.shape, x.shape[-1]))
    return (picked * weights[..., None]).sum(-2)


def test_pairs_of_token_and_choice_are_sorted_by_expert() -> None:
    routing = route(LOGITS, CONFIG)
    assert routing.order_S.tolist() == [0, 4, 1, 3, 5, 2]  # an entry is token * 2 + choice
    assert routing.ends_X.tolist() == [2, 2, 5, 6]
    assert routing.count_tokens().tolist() == [2, 0, 3, 1]


def test_normalized_router_weights_sum_to_1() -> None:
    plain = route(LOGITS, CONFIG).weights_NK
    normalized = route(LOGITS, ExpertsConfig(**{**_fields(CONFIG), "normalizes_weights": True})).weights_NK
    assert_close(plain, LOGITS.softmax(-1).topk(2).values)
    assert_close(normalized.sum(-1), torch.ones(3))
    assert_close(normalized[:, 0] / normalized[:, 1], plain[:, 0] / plain[:, 1])


def _fields(config: ExpertsConfig) -> dict[str, int | bool | tuple[int, ...]]:
    return {name: getattr(config, name) for name in config.__struct_fields__}


def test_the_layer_equals_a_dense_computation_of_all_experts() -> None:
    layer, x = build_layer(), torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(1))
    assert_close(layer(x), compute_densely(layer, x), rtol=1e-5)


def test_experts_without_tokens_have_zero_gradients() -> None:
    layer = build_layer()
    gradients = run_and_collect_gradients(layer, torch.ones(1, 3, 16))  # equal tokens select the same two experts
    counts = take_expert_counts(layer)
    assert counts is not None
    assert sorted(counts[0].tolist()) == [0, 0, 3, 3]
    idle = int(counts[0].argmin())
    assert gradients[f"experts.{idle}.up_proj.weight"].abs().max() == 0
    assert gradients.keys() == {"output", "input", *dict(layer.named_parameters())}


def test_no_gradients_are_computed_for_the_weights_of_frozen_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 7, 16, generator=torch.Generator().manual_seed(1))
    expected = run_and_collect_gradients(build_layer(), x)
    frozen = build_layer()
    frozen.experts.requires_grad_(False)
    monkeypatch.setattr(experts, "_multiply_transposed", None)
    found = run_and_collect_gradients(frozen, x)
    assert found.keys() == {"output", "input", "gate.weight"}
    assert all(torch.equal(each, expected[name]) for name, each in found.items())


def test_after_a_pass_without_tokens_every_parameter_has_a_gradient() -> None:
    layer = build_layer()
    gradients = run_and_collect_gradients(layer, torch.zeros(0, 5, 16))
    assert gradients.keys() == {"output", "input", *dict(layer.named_parameters())}


@pytest.mark.usefixtures("kernel")
def test_grouped_products_equal_a_loop_of_products(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 7, 16, generator=torch.Generator().manual_seed(1))
    by_kernel = run_and_collect_gradients(build_layer(), x)
    monkeypatch.undo()
    assert_close(by_kernel, run_and_collect_gradients(build_layer(), x), rtol=1e-5)


@pytest.mark.parametrize(("stored", "computed"), [(torch.float32, torch.bfloat16), (torch.float64, torch.float32)])
def test_weights_get_the_gradients_of_their_narrow_copies(stored: torch.dtype, computed: torch.dtype) -> None:
    x = torch.randn(3, 7, 16, generator=torch.Generator().manual_seed(1)).to(computed)
    wide = run_and_collect_gradients(build_layer().to(stored), x)
    narrow = run_and_collect_gradients(build_layer().to(computed), x)
    for name, parameter in build_layer().to(stored).named_parameters():
        assert wide[name].dtype == parameter.dtype
    assert all(torch.equal(wide[name], each.to(wide[name].dtype)) for name, each in narrow.items())


def test_the_number_of_conversions_does_not_depend_on_the_number_of_experts() -> None:
    x = torch.randn(3, 7, 16, generator=torch.Generator().manual_seed(1)).bfloat16()

    def count(num_experts: int) -> int:
        layer = build_layer(config=ExpertsConfig(num_experts=num_experts, experts_per_token=2, expert_size=8))
        with ConversionCounter() as counter:
            run_and_collect_gradients(layer, x)
        return counter.conversions

    assert count(4) == count(12)


class ConversionCounter(TorchDispatchMode):
    """A counter of operations that copy tensors into another dtype."""

    conversions = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.conversions += "_copy" in func.name()
        return func(*args, **(kwargs or {}))


def test_each_row_is_multiplied_only_by_the_matrix_of_its_expert() -> None:
    x_SI, weights_XIO = torch.ones(3, 2), torch.tensor([[[1.0], [1.0]], [[10.0], [10.0]], [[100.0], [100.0]]])
    ends_X = torch.tensor([2, 2, 3], dtype=torch.int32)
    assert multiply_grouped(x_SI, weights_XIO, ends_X).flatten().tolist() == [2.0, 2.0, 200.0]


def test_grouped_products_are_not_supported_on_a_cpu() -> None:
    assert not supports_grouped_mm(torch.device("cpu"), torch.bfloat16, (64,))


@pytest.mark.parametrize(
    ("capability", "dtype", "sizes", "expected"),
    [
        ((9, 0), torch.bfloat16, (2048, 768), True),
        ((9, 0), torch.float32, (2048, 768), False),
        ((8, 0), torch.bfloat16, (2048, 768), False),
        ((9, 0), torch.bfloat16, (2048, 772), False),
    ],
)
def test_grouped_products_require_a_recent_gpu_bfloat16_and_aligned_rows(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    dtype: torch.dtype,
    sizes: tuple[int, int],
    expected: bool,
) -> None:
    def get_capability(device: torch.device) -> tuple[int, int]:
        return capability

    monkeypatch.setattr(torch.cuda, "get_device_capability", get_capability)
    assert supports_grouped_mm(torch.device("cuda", 0), dtype, sizes) == expected


# ---------------------------------------------------------------- load


def test_taking_the_counts_of_all_passes_resets_them() -> None:
    model = small_model(config=small_architecture("qwen3_moe"))
    model(torch.arange(10)[None])
    model(torch.arange(20)[None])
    counts = take_expert_counts(model)
    assert counts is not None
    assert counts.shape == (1, 8)  # the first of the two layers has no experts
    assert int(counts.sum()) == 30 * 3
    assert take_expert_counts(model) is None


def test_a_dense_model_has_no_expert_counts() -> None:
    model = small_model()
    model(torch.arange(10)[None])
    assert take_expert_counts(model) is None


def test_expert_load_is_relative_to_the_mean_of_each_layer() -> None:
    counts = torch.tensor([[2, 2, 2, 2], [8, 0, 0, 0], [4, 4, 0, 0]])
    assert compute_expert_load(counts) == ExpertLoad(
        max_over_mean=pytest.approx((1 + 4 + 2) / 3), worst_max_over_mean=4.0, idle_share=pytest.approx(5 / 12)
    )

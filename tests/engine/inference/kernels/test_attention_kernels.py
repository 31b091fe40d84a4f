"""Tests: attention kernels match the formula, packed products match plain ones, and logits are float32."""

import pytest
import torch
from torch import Tensor

from asterism.engine.inference.kernels.attention_kernels import (
    AttentionKernels,
    BatchInvariantKernels,
    FastCpuKernels,
    SdpaKernels,
)
from asterism.engine.inference.kernels.matmul import (
    MIN_PACKED_SIZE,
    PACKED,
    build_tiled,
    compute_logits,
    select_fast_matmul,
)

ROWS, WIDTH, SIZE = 5, 64, 16


def expected(q_RKGD: Tensor, keys_RKWD: Tensor, values_RKWD: Tensor, mask_R1W: Tensor) -> Tensor:
    scores = q_RKGD @ keys_RKWD.transpose(-1, -2) + mask_R1W[:, None]
    return (scores.softmax(-1) @ values_RKWD).flatten(0, 1)


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def mask() -> Tensor:
    """Build a mask: the first row attends to one token, the last row to all tokens but one."""
    places = torch.linspace(0, WIDTH - 2, ROWS).long()
    return torch.where(torch.arange(WIDTH) > places[:, None, None], float("-inf"), 0.0)


@pytest.mark.parametrize("kernels", [BatchInvariantKernels(), SdpaKernels(), FastCpuKernels()])
@pytest.mark.parametrize(("heads", "group"), [(1, 1), (2, 2), (2, 3), (1, 8)])
@pytest.mark.parametrize("apart", [WIDTH, WIDTH + 32])
def test_rows_with_separate_keys_follow_the_mask(kernels: AttentionKernels, heads: int, group: int, apart: int) -> None:
    q, both = drawn(ROWS * heads, group, SIZE), drawn(2, ROWS * heads, apart, SIZE)
    keys, values = both[:, :, :WIDTH].unbind(0)
    found = torch.full_like(q, float("nan"))
    kernels.attend_per_row(q, keys, values, mask(), found)
    by_row = (part.unflatten(0, (ROWS, heads)) for part in (q, keys, values))
    torch.testing.assert_close(found, expected(*by_row, mask()), atol=1e-5, rtol=0)


@pytest.mark.parametrize("kernels", [BatchInvariantKernels(), SdpaKernels(), FastCpuKernels()])
@pytest.mark.parametrize(("heads", "group"), [(1, 1), (2, 2), (2, 3), (1, 8)])
def test_rows_with_shared_keys_follow_the_mask(kernels: AttentionKernels, heads: int, group: int) -> None:
    q, both = drawn(ROWS * heads, group, SIZE), drawn(2, heads, WIDTH, SIZE)
    found = torch.full_like(q, float("nan"))
    kernels.attend_shared(q, both[0], both[1], mask(), found)
    keys, values = both.unsqueeze(1).expand(-1, ROWS, -1, -1, -1)
    torch.testing.assert_close(found, expected(q.unflatten(0, (ROWS, heads)), keys, values, mask()), atol=1e-5, rtol=0)


def test_bfloat16_logits_on_a_cpu_are_the_product_cast_to_float32() -> None:
    x_NE, head_EV = drawn(5, 16).bfloat16(), drawn(16, 30).bfloat16()
    logits = compute_logits(torch.mm, x_NE, head_EV)
    assert logits.dtype == torch.float32
    assert torch.equal(logits, (x_NE @ head_EV).float())


def test_float32_logits_come_from_the_given_product() -> None:
    x_NE, head_EV, tiled = drawn(5, 16), drawn(16, 30), build_tiled(4).mm
    assert torch.equal(compute_logits(tiled, x_NE, head_EV), tiled(x_NE, head_EV))


@pytest.mark.parametrize("rows", [1, 5, 70])
def test_packed_products_match_plain_products(rows: int) -> None:
    assert select_fast_matmul(torch.device("cpu"), torch.float32) is PACKED
    x_NK, weights_KF, to_NF = drawn(rows, 256), drawn(256, MIN_PACKED_SIZE // 256), drawn(rows, MIN_PACKED_SIZE // 256)
    packed = PACKED.prepare(weights_KF)
    assert packed.is_mkldnn
    torch.testing.assert_close(PACKED.mm(x_NK, packed), x_NK @ weights_KF, atol=1e-4, rtol=0)
    torch.testing.assert_close(PACKED.add_mm(to_NF, x_NK, packed), to_NF + x_NK @ weights_KF, atol=1e-4, rtol=0)


def test_small_matrices_are_not_packed() -> None:
    x_NK, weights_KF = drawn(5, 16), drawn(16, 30)
    assert PACKED.prepare(weights_KF) is weights_KF
    assert torch.equal(PACKED.mm(x_NK, weights_KF), x_NK @ weights_KF)
    assert torch.equal(PACKED.add_mm(drawn(5, 30), x_NK, weights_KF), torch.addmm(drawn(5, 30), x_NK, weights_KF))

"""Tests: the attention kernels of both devices match the formula, and the last product returns float32 logits."""

import pytest
import torch
from torch import Tensor

from asterism.engine.inference.kernels.attention_kernels import AttentionKernels, BatchInvariantKernels, SdpaKernels
from asterism.engine.inference.kernels.matmul import build_tiled, compute_logits

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


@pytest.mark.parametrize("kernels", [BatchInvariantKernels(), SdpaKernels()])
@pytest.mark.parametrize(("heads", "group"), [(1, 1), (2, 2), (2, 3), (1, 8)])
@pytest.mark.parametrize("apart", [WIDTH, WIDTH + 32])
def test_rows_with_separate_keys_follow_the_mask(kernels: AttentionKernels, heads: int, group: int, apart: int) -> None:
    q, both = drawn(ROWS * heads, group, SIZE), drawn(2, ROWS * heads, apart, SIZE)
    keys, values = both[:, :, :WIDTH].unbind(0)
    found = torch.full_like(q, float("nan"))
    kernels.attend_per_row(q, keys, values, mask(), found)
    by_row = (part.unflatten(0, (ROWS, heads)) for part in (q, keys, values))
    torch.testing.assert_close(found, expected(*by_row, mask()), atol=1e-5, rtol=0)


@pytest.mark.parametrize("kernels", [BatchInvariantKernels(), SdpaKernels()])
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

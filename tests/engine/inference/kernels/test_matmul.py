"""Tests of the last product of a pass, float32 logits."""

import torch

from asterism.engine.inference.kernels.matmul import build_tiled, compute_logits


def test_bfloat16_logits_on_a_cpu_are_the_product_cast_to_float32() -> None:
    generator = torch.Generator().manual_seed(0)
    x_NE, head_EV = (torch.randn(shape, generator=generator).bfloat16() for shape in ((5, 16), (16, 30)))
    logits = compute_logits(torch.mm, x_NE, head_EV)
    assert logits.dtype == torch.float32
    assert torch.equal(logits, (x_NE @ head_EV).float())


def test_float32_logits_come_from_the_given_product() -> None:
    generator = torch.Generator().manual_seed(0)
    x_NE, head_EV = torch.randn(5, 16, generator=generator), torch.randn(16, 30, generator=generator)
    tiled = build_tiled(4).mm
    assert torch.equal(compute_logits(tiled, x_NE, head_EV), tiled(x_NE, head_EV))

"""Tests of strict engines: the bits of a token depend only on the token's sequence, or the engine does not start."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from asterism.engine.contract import Capacity, GenerationRequest
from asterism.engine.inference.embedded import EmbeddedEngine
from asterism.engine.inference.kernels.batch_invariance import (
    NotBatchInvariant,
    check_attention,
    find_batch_invariant_matmul,
)
from asterism.engine.inference.kernels.matmul import Matmul, build_tiled
from tests.engine.closeness import assert_close
from tests.engine.started_engines import started
from tests.engine.tiny_models import small_config

LONGEST, PAGE = 96, 16
CONFIG = small_config()


def _multiply_rows(x_NK: Tensor, weights_KF: Tensor) -> Tensor:
    """Multiply each row separately, which is batch-invariant on every machine."""
    return torch.stack([weights_KF.t() @ row_K.clone() for row_K in x_NK])


def _multiply_dependently(x_NK: Tensor, weights_KF: Tensor) -> Tensor:
    """Multiply rows. If there are more than 30 rows, the last bits differ."""
    return _multiply_rows(x_NK, weights_KF) * (1.0 + 2.0**-23 * (len(x_NK) > 30))


def _build_matmul(mm: Callable[[Tensor, Tensor], Tensor]) -> Matmul:
    def add_mm(to_NF: Tensor, x_NK: Tensor, weights_KF: Tensor) -> Tensor:
        return to_NF + mm(x_NK, weights_KF)

    return Matmul(mm, add_mm)


BY_ROW, DEPENDENT = _build_matmul(_multiply_rows), _build_matmul(_multiply_dependently)


class AttentionByRow:
    """Attention that computes each row separately; it is batch-invariant unless `depends_on_batch`."""

    def __init__(self, *, depends_on_batch: bool) -> None:
        self._factor = 1.0 + 2.0**-20 * depends_on_batch

    def attend_per_row(
        self, q_XGD: Tensor, keys_XWD: Tensor, values_XWD: Tensor, mask_R1W: Tensor, out_XGD: Tensor
    ) -> None:
        rows, heads = len(mask_R1W), len(q_XGD) // len(mask_R1W)
        for index, query_GD in enumerate(q_XGD):
            seen = mask_R1W[index // heads, 0] == 0
            keys_SD, values_SD = keys_XWD[index, seen], values_XWD[index, seen]
            out_XGD[index] = (query_GD.clone() @ keys_SD.t()).softmax(-1) @ values_SD
        if rows > 1:
            out_XGD *= self._factor

    def attend_shared(
        self, q_XGD: Tensor, keys_KWD: Tensor, values_KWD: Tensor, mask_R1W: Tensor, out_XGD: Tensor
    ) -> None:
        rows = len(mask_R1W)
        self.attend_per_row(q_XGD, keys_KWD.repeat(rows, 1, 1), values_KWD.repeat(rows, 1, 1), mask_R1W, out_XGD)


@pytest.mark.slow
def test_products_that_depend_on_the_number_of_rows_are_replaced() -> None:
    assert find_batch_invariant_matmul(CONFIG, 64, 16, [DEPENDENT, BY_ROW]) is BY_ROW
    assert find_batch_invariant_matmul(CONFIG, 29, 16, [DEPENDENT, BY_ROW]) is DEPENDENT


def test_a_machine_without_batch_invariant_products_is_refused() -> None:
    with pytest.raises(NotBatchInvariant, match=r'"strict", but on this machine .* matrix products'):
        find_batch_invariant_matmul(CONFIG, 64, 16, [DEPENDENT])


def test_attention_that_depends_on_the_batch_is_refused() -> None:
    check_attention(AttentionByRow(depends_on_batch=False), CONFIG, 300)
    with pytest.raises(NotBatchInvariant, match="attention"):
        check_attention(AttentionByRow(depends_on_batch=True), CONFIG, 300)


@pytest.mark.parametrize("count", [1, 7, 8, 9, 40])
def test_tiled_products_equal_plain_products(count: int) -> None:
    x_NK, weights_KF, to_NF = torch.randn(count, 12), torch.randn(12, 20), torch.randn(count, 20)
    assert_close(build_tiled(8).mm(x_NK, weights_KF), x_NK @ weights_KF)
    assert_close(build_tiled(8).add_mm(to_NF, x_NK, weights_KF), to_NF + x_NK @ weights_KF)


@pytest.mark.real_clock
async def test_strict_and_fast_engines_generate_the_same_tokens(model_folder: Path) -> None:
    request = GenerationRequest(0, np.arange(9, dtype=np.int32), 12, seed=4)
    capacity = Capacity(LONGEST, PAGE, LONGEST)
    found: list[list[int]] = []
    for strict in (True, False):
        made = EmbeddedEngine(model_folder, capacity, max_running=8, prefill_tokens=24, strict=strict)
        async with started(made) as (engine, _):
            found.append((await engine.generate(request)).token_ids.tolist())
    assert found[0] == found[1]


@pytest.mark.real_clock
async def test_a_strict_engine_in_bfloat16_does_not_start(model_folder: Path) -> None:
    made = EmbeddedEngine(model_folder, Capacity(LONGEST, PAGE, LONGEST), dtype=torch.bfloat16, strict=True)
    with pytest.raises(NotBatchInvariant, match=r"torch\.bfloat16 cannot be strict"):
        async with started(made):
            pass

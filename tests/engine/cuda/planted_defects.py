"""Defects that a process plants into the code while it runs a case. The suite must find each of them."""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from asterism.engine.learner import trainer
from asterism.engine.learner.distributed import RankGroup, all_reduce
from asterism.engine.learner.loss_reduction import LossSums
from asterism.engine.model import causal_lm, packed_attention
from asterism.engine.model.compiled_parts import run_eagerly
from asterism.engine.model.layers import RmsNorm
from asterism.policies.losses.head_kernels import EagerHeadKernels
from asterism.policies.losses.policy_loss import LossOutput


@contextmanager
def plant_empty_cpu_maxima() -> Generator[None]:
    """Compute the maxima of an empty tensor in host memory, as an earlier version of the cold start did."""

    def stack(values: Mapping[str, Tensor]) -> Tensor:
        stacked = [each.detach().reshape(()).to(torch.float64) for each in values.values()]
        return torch.stack(stacked) if stacked else torch.zeros(0, dtype=torch.float64)

    def reduce_outputs(outputs: Sequence[LossOutput], ranks: RankGroup) -> LossSums:
        loss = all_reduce(ranks, torch.stack([each.loss.double() for each in outputs]).sum(0), ReduceOp.SUM)
        maxima = torch.stack([stack(each.maxima) for each in outputs]).amax(0)
        found = all_reduce(ranks, maxima, ReduceOp.MAX).tolist()
        return LossSums(float(loss), {}, {}, dict(zip(outputs[0].maxima, found, strict=True)))

    with patch.object(trainer, "reduce_outputs", reduce_outputs):
        yield


@contextmanager
def plant_item() -> Generator[None]:
    """Read the value of a tensor in each micro batch."""
    build = trainer._build_loss_input  # pyright: ignore[reportPrivateUsage]

    def build_and_read(batch: Any, totals: Any, scores: Any, *rest: Any) -> Any:
        assert scores.logprobs_N.sum().item() is not None
        return build(batch, totals, scores, *rest)

    with patch.object(trainer, "_build_loss_input", build_and_read):
        yield


@contextmanager
def plant_cpu_mask() -> Generator[None]:
    """Put an attention mask into host memory."""
    attend = packed_attention.attend_segments

    def attend_masked(q_THD: Tensor, *rest: Any) -> Tensor:
        return attend(q_THD * torch.ones(len(q_THD), 1, 1, dtype=q_THD.dtype), *rest)

    with patch.object(packed_attention, "attend_segments", attend_masked):
        yield


@contextmanager
def plant_pageable_copy() -> Generator[None]:
    """Put micro batches into host memory that is not page-locked."""
    with patch.object(Tensor, "pin_memory", lambda self: self):
        yield


@contextmanager
def plant_eager_layers() -> Generator[None]:
    """Run the layers without compilation."""
    with patch.object(causal_lm, "run_compiled", run_eagerly):
        yield


@contextmanager
def plant_eager_head() -> Generator[None]:
    """Run the elementwise part of the output head without compilation."""
    with patch.object(causal_lm, "compile_head_kernels", EagerHeadKernels):
        yield


@contextmanager
def plant_unfused_norm() -> Generator[None]:
    """Replace torch's norm with single operations."""

    def normalize(self: RmsNorm, x: Tensor) -> Tensor:
        exact = x.float()
        return (exact * (exact.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.weight).to(x.dtype)

    with patch.object(RmsNorm, "forward", normalize):
        yield


DEFECTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    **{"empty CPU maxima": plant_empty_cpu_maxima, "item": plant_item, "CPU mask": plant_cpu_mask},
    **{"pageable copy": plant_pageable_copy, "eager layers": plant_eager_layers, "eager head": plant_eager_head},
    "unfused norm": plant_unfused_norm,
}

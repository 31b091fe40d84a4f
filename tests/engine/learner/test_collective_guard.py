"""Tests of the tensors in the learner's collectives, on one and on two gloo ranks.

On a CPU, no tensor is on a wrong device. So the tests check that each reduced tensor has elements and
derives from the parameters.
"""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import Tensor, nn
from torch.distributed import HashStore, ReduceOp  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from asterism.configs.schema.algorithm import SftConfig, SftFileConfig
from asterism.engine.learner import trainer as trainer_module
from asterism.engine.learner.distributed import RankGroup, all_reduce
from asterism.engine.learner.sharding import shard_model
from asterism.engine.learner.trainer import Trainer
from tests.engine.cuda.checked_collectives import checking_collectives
from tests.engine.learner.rank_processes import run_ranks
from tests.engine.learner.training_examples import rl_sequences, sequences, small_run, trainable_model

pytestmark = pytest.mark.slow


class Derivation(TorchDispatchMode):
    """A mode that finds all tensors computed from `roots`. It identifies tensors by their storage."""

    def __init__(self, roots: Sequence[Tensor]) -> None:
        super().__init__()
        self._derived: set[int] = set()
        for root in roots:
            self._add(root)

    def derives(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._derived

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._derived:
            self._derived.add(storage._cdata)
            weakref.finalize(storage, self._derived.discard, storage._cdata)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        given = list_plain_tensors((args, kwargs))
        if any(map(self.derives, given)):
            for each in list_plain_tensors(out) + (given if func._schema.is_mutable else []):
                self._add(each)
        return out


def list_plain_tensors(tree: object) -> list[Tensor]:
    return [each for each in tree_leaves(tree) if isinstance(each, Tensor) and not isinstance(each, DTensor)]


def list_roots(model: nn.Module) -> list[Tensor]:
    return [each.to_local() if isinstance(each, DTensor) else each for each in model.parameters()]


def plant_empty_maxima() -> None:
    """Plant a repaired defect: the reduction of an empty tensor, which does not derive from parameters."""
    reduce_outputs = trainer_module.reduce_outputs

    def reduce_also_maxima(outputs: Any, ranks: RankGroup) -> Any:
        if not outputs[0].maxima:
            all_reduce(ranks, torch.zeros(0, dtype=torch.float64), ReduceOp.MAX)
        return reduce_outputs(outputs, ranks)

    trainer_module.reduce_outputs = reduce_also_maxima


def run_steps(ranks: RankGroup, defect: str = "") -> tuple[list[str], int]:
    """Run steps of RL and the cold start, and check the weights. Return the violations and the number of tensors.

    The model has experts. The defect "maxima" reduces an empty tensor.
    """
    if ranks.world_size == 1:  # without a group, a single rank sends nothing
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        ranks = RankGroup(tensor_group=dist.group.WORLD)
    model = trainable_model("qwen3_moe")
    shard_model(model, ranks)
    mixture = (SftFileConfig(name="one", data="one.jsonl"), SftFileConfig(name="two", data="two.jsonl"))
    run = replace(small_run(old_logprobs="recomputed"), sft=SftConfig(steps=9, mixture=mixture))
    trainer = Trainer(model, run, ranks)
    if defect:
        plant_empty_maxima()
    violations: list[str] = []
    sent: list[str] = []

    def check(name: str, tensor: Tensor, group: Any) -> None:
        sent.append(name)
        if name == "all_reduce" and (not tensor.numel() or not derivation.derives(tensor)):
            violations.append(f"{name} of {tuple(tensor.shape)}")

    with Derivation(list_roots(model)) as derivation, checking_collectives(check, calls=True):
        trainer.run_sft_step(sequences(0))
        trainer.start_stage("rl")
        trainer.run_rl_step(rl_sequences(1))
        trainer.check_weights()
    return violations, len(sent)


@pytest.mark.parametrize("count", [1, 2])
def test_each_reduced_tensor_has_elements_and_derives_from_the_parameters(count: int) -> None:
    for violations, num_sent in run_ranks(count, run_steps):
        assert violations == []
        assert num_sent > 0


def test_a_planted_reduction_of_an_empty_tensor_is_found() -> None:
    ((violations, _),) = run_ranks(1, run_steps, "maxima")
    assert violations == ["all_reduce of (0,)"]

"""Tests: activation checkpointing keeps fewer tensors and gives the same gradients."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from asterism.configs.schema.learner_config import Checkpointing
from asterism.engine.hf.architectures import ARCHITECTURES
from asterism.engine.model.causal_lm import CausalLM
from tests.engine.tiny_models import VOCABULARY, score_packed, small_architecture, small_model

pytestmark = pytest.mark.slow  # torch.utils.checkpoint imports torch's compiler, which takes about a second
LENGTHS = (60, 4, 36)


def compute_gradients(model: CausalLM, recomputed: Checkpointing, count: Callable[[Tensor], Tensor]) -> list[Tensor]:
    model.set_recomputed(recomputed)
    token_ids_T = torch.randint(0, VOCABULARY, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))
    with torch.autograd.graph.saved_tensors_hooks(count, lambda each: each):
        logprobs_N = score_packed(model, token_ids_T, LENGTHS)
    return list(torch.autograd.grad(logprobs_N.sum(), list(model.parameters())))


class SavedBytes:
    """A counter of the bytes of activations that a forward pass keeps outside checkpoints."""

    def __init__(self, model: CausalLM) -> None:
        self.total = 0
        self._seen = {each.data_ptr() for each in model.parameters()}

    def count(self, tensor: Tensor) -> Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in self._seen:
            self._seen.add(address)
            self.total += tensor.untyped_storage().nbytes()
        return tensor


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_recomputed_activations_give_the_same_gradients(model_type: str) -> None:
    model = small_model(config=small_architecture(model_type), std=0.1).requires_grad_(True)
    kept = SavedBytes(model)
    expected = compute_gradients(model, "none", kept.count)
    for recomputed in ("selective", "attention", "full"):
        saved = SavedBytes(model)
        found = compute_gradients(model, recomputed, saved.count)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        assert saved.total < 0.7 * kept.total

import pytest
import torch
from torch import nn

from configs.schema import Learner, Sft
from engine.optimizers import Muon, rl_optimizers, sft_optimizers
from tests.engine.tiny_models import small_config, small_model

pytestmark = pytest.mark.slow  # the first of torch's optimizers imports its compiler, which takes a second


def test_a_zero_gradient_moves_nothing() -> None:
    parameter = nn.Parameter(torch.ones(4, 3))
    parameter.grad = torch.zeros(4, 3)
    Muon([parameter], lr=0.1).step()
    assert torch.equal(parameter, torch.ones(4, 3))


def test_muon_updates_matrices_of_one_shape_together_as_it_would_one_by_one() -> None:
    generator = torch.Generator().manual_seed(2)
    starts = [torch.randn(6, 4, generator=generator) for _ in range(3)]
    together, alone = ([nn.Parameter(start.clone()) for start in starts] for _ in range(2))
    optimizers = [Muon(together, lr=0.1), *(Muon([parameter], lr=0.1) for parameter in alone)]
    for _ in range(3):
        for one, other in zip(together, alone, strict=True):
            one.grad = torch.randn(6, 4, generator=generator)
            other.grad = one.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(together, alone)


def test_muon_agrees_with_torch_up_to_its_bfloat16() -> None:
    generator = torch.Generator().manual_seed(3)
    ours = nn.Parameter(torch.randn(24, 8, generator=generator))
    theirs = nn.Parameter(ours.detach().clone())
    optimizers = (Muon([ours], lr=0.1, weight_decay=0.1), torch.optim.Muon([theirs], lr=0.1, weight_decay=0.1))
    for _ in range(3):
        ours.grad = torch.randn(24, 8, generator=generator)
        theirs.grad = ours.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(ours, theirs, atol=5e-3, rtol=0)


def test_the_cold_start_gives_muon_the_layers_matrices_and_adamw_the_rest() -> None:
    model = small_model(config=small_config(tie_word_embeddings=False)).requires_grad_(True)
    names = {parameter: name for name, parameter in model.named_parameters()}
    muon, adamw = (
        [names[p] for p in optimizer.param_groups[0]["params"]] for optimizer in sft_optimizers(model, Sft())
    )
    assert all(name.startswith("model.layers.") and "norm" not in name for name in muon)
    assert {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"} <= set(adamw)
    assert sorted([*muon, *adamw]) == sorted(names.values())


def test_reinforcement_learning_gives_adamw_everything() -> None:
    model = small_model().requires_grad_(True)
    (adamw,) = rl_optimizers(model, Learner())
    assert sum(len(group["params"]) for group in adamw.param_groups) == len(list(model.parameters()))

import pytest
import torch
from torch import nn

from asterism.configs.choices.optimizer_kinds import OPTIMIZER_KINDS
from asterism.configs.schema.algorithm import SftConfig
from asterism.configs.schema.learner_config import LearnerConfig
from asterism.engine.learner.optimizers import Muon, build_rl_optimizers, build_sft_optimizers, orthogonalize
from tests.engine.closeness import assert_close
from tests.engine.tiny_models import small_config, small_model

slow = pytest.mark.slow  # the first use of a torch optimizer imports torch's compiler, which takes a second


@slow
def test_a_zero_gradient_changes_nothing() -> None:
    parameter = nn.Parameter(torch.ones(4, 3))
    parameter.grad = torch.zeros(4, 3)
    Muon([parameter], lr=0.1).step()
    assert torch.equal(parameter, torch.ones(4, 3))


@slow
def test_muon_updates_batched_matrices_like_single_matrices() -> None:
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


@slow
def test_muon_equals_torch_muon_up_to_bfloat16_rounding() -> None:
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


@slow
def test_muon_updates_the_matrices_of_layers_and_adamw_the_other_parameters() -> None:
    model = small_model(config=small_config(tie_word_embeddings=False)).requires_grad_(True)
    names = {parameter: name for name, parameter in model.named_parameters()}
    muon, adamw = (
        [names[p] for p in optimizer.param_groups[0]["params"]]
        for optimizer in build_sft_optimizers(model, SftConfig(optimizer="muon"))
    )
    assert all(name.startswith("model.layers.") and "norm" not in name for name in muon)
    assert {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"} <= set(adamw)
    assert sorted([*muon, *adamw]) == sorted(names.values())


@slow
def test_adamw_updates_all_parameters_of_rl_and_of_the_default_cold_start() -> None:
    model = small_model().requires_grad_(True)
    (cold_start,), (rl,) = build_sft_optimizers(model, SftConfig()), build_rl_optimizers(model, LearnerConfig())
    assert cold_start.defaults["lr"] == 1e-5
    for adamw in (cold_start, rl):
        assert isinstance(adamw, torch.optim.AdamW)
        assert sum(len(group["params"]) for group in adamw.param_groups) == len(list(model.parameters()))


@slow
@pytest.mark.parametrize("name", OPTIMIZER_KINDS)
def test_an_optimizer_has_the_number_of_moments_in_its_record(name: str) -> None:
    model = small_model().requires_grad_(True)
    numbers: set[float] = set()
    for optimizer in build_sft_optimizers(model, SftConfig(optimizer=name)):
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        for parameter, state in optimizer.state.items():
            moments = [each for each in state.values() if each.shape == parameter.shape]
            assert all(each.dtype == torch.float32 for each in moments)
            numbers.add(len(moments))
    assert max(numbers) == OPTIMIZER_KINDS[name].moments


@pytest.mark.parametrize("shape", [(8, 8), (16, 6), (6, 16)])
def test_orthogonalization_moves_every_singular_value_to_about_one(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    matrices_KRC = torch.randn(3, *shape, generator=generator)
    singular_values = torch.linalg.svdvals(orthogonalize(matrices_KRC))
    assert singular_values.min() > 0.5
    assert singular_values.max() < 1.3


def test_orthogonalization_keeps_the_singular_vectors() -> None:
    generator = torch.Generator().manual_seed(1)
    matrix_RC = torch.randn(12, 8, generator=generator)
    u, _, vt = torch.linalg.svd(matrix_RC, full_matrices=False)
    inner = u.T @ orthogonalize(matrix_RC[None])[0] @ vt.T
    assert_close(inner, torch.diag(inner.diagonal()), atol=1e-4, rtol=0)

"""Tests: compiled layers give the gradients of eager layers, and one compilation serves all lengths."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import get_args

import pytest
import torch
from torch import Tensor

from asterism.configs.schema.learner_config import Checkpointing
from asterism.engine.hf.architectures import ARCHITECTURES
from asterism.engine.model import compiled_parts
from asterism.engine.model.causal_lm import CausalLM
from tests.engine.tiny_models import VOCABULARY, score_packed, small_architecture, small_model

pytestmark = [
    pytest.mark.slow,  # compilation takes about 20 s and needs g++
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # torch's compiler reads this attribute
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated"),  # torch's compiler uses this method
]
CHECKPOINTING = get_args(Checkpointing)
LENGTHS = (60, 4, 36)
OTHER_LENGTHS = ((7,), (1,), (2, 3, 5, 90), (300, 200))


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    """Reset torch's compiler, which limits the number of compilations of a part in a process."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def score(model: CausalLM, lengths: Sequence[int]) -> Tensor:
    token_ids_T = torch.randint(0, VOCABULARY, (sum(lengths),), generator=torch.Generator().manual_seed(0))
    return score_packed(model, token_ids_T, lengths)


def compute_gradient(model: CausalLM, lengths: Sequence[int]) -> Tensor:
    """Return the gradient of the mean log probability with respect to all parameters, as one vector."""
    gradients = torch.autograd.grad(score(model, lengths).mean(), list(model.parameters()))
    return torch.cat([each.flatten() for each in gradients])


@pytest.mark.parametrize(
    ("model_type", "modes"),
    [
        ("qwen3", ("selective",)),
        *(pytest.param(each, CHECKPOINTING, marks=pytest.mark.nightly) for each in ARCHITECTURES),
    ],
)
def test_compiled_layers_give_the_gradients_of_eager_layers_for_all_lengths(
    model_type: str, modes: Sequence[Checkpointing]
) -> None:
    """Passes without gradients have their own compiled code."""
    model = small_model(config=small_architecture(model_type), std=0.1).requires_grad_(True)
    all_lengths = (LENGTHS, *OTHER_LENGTHS)
    expected = [compute_gradient(model, lengths) for lengths in all_lengths]
    expected_scores = score(model, LENGTHS)
    model.set_compiled(True)
    for recomputed in modes:
        model.set_recomputed(recomputed)
        found = [compute_gradient(model, LENGTHS)]
        with torch.no_grad():
            scores = score(model, LENGTHS)
        with torch._dynamo.config.patch(error_on_recompile=True):  # pyright: ignore
            for lengths in OTHER_LENGTHS:
                found.append(compute_gradient(model, lengths))
                with torch.no_grad():
                    score(model, lengths)
        torch.testing.assert_close(scores, expected_scores, rtol=0, atol=1e-5)
        for one, other in zip(expected, found, strict=True):
            torch.testing.assert_close(other, one, rtol=0, atol=1e-6 * float(one.norm()))
        assert any(not torch.equal(one, other) for one, other in zip(expected, found, strict=True))


def test_each_part_and_mode_has_its_own_limit_of_compilations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases: cold start, RL with frozen weights, and passes without gradients, each with all modes of checkpointing."""
    compile_eagerly = partial(torch.compile, backend="eager")
    monkeypatch.setattr(compiled_parts.torch, "compile", compile_eagerly)
    compiled_parts._compile.cache_clear()  # pyright: ignore[reportPrivateUsage]
    model = small_model(config=small_architecture("qwen2"), std=0.1).requires_grad_(True)
    model.set_compiled(True)
    with torch._dynamo.config.patch(recompile_limit=8):  # pyright: ignore
        monkeypatch.setattr(compiled_parts, "_raise_limit", lambda: None)
        for recomputed in CHECKPOINTING:
            model.set_recomputed(recomputed)
            for is_frozen in (False, True):
                model.model.embed_tokens.requires_grad_(not is_frozen)
                score(model, LENGTHS).sum().backward()
                with torch.no_grad():
                    score(model, LENGTHS)
    assert compiled_parts._compile.cache_info().currsize > 2  # pyright: ignore[reportPrivateUsage]
    compiled_parts._compile.cache_clear()  # pyright: ignore[reportPrivateUsage]

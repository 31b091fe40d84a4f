"""Tests: packed sequences give the scores and gradients of padded rows."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from asterism.engine.hf.architectures import ARCHITECTURES
from asterism.engine.model.causal_lm import CausalLM
from asterism.engine.model.packed_attention import build_segments, find_causal_options
from asterism.policies.losses.token_scores import ScoredTokens
from tests.engine.closeness import assert_close
from tests.engine.tiny_models import VOCABULARY, score_packed, small_architecture, small_model

LENGTHS = (9, 1, 4, 17)


def make_rows() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, VOCABULARY, (length,), generator=generator) for length in LENGTHS]


def score_padded(model: CausalLM, rows: list[Tensor]) -> Tensor:
    token_ids_BT = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    width = token_ids_BT.shape[1]
    positions_N = torch.cat([row * width + torch.arange(length) for row, length in enumerate(LENGTHS)])
    return model(token_ids_BT, tokens=ScoredTokens(positions_N, torch.cat(rows).flip(0))).logprobs_N


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_packed_and_padded_sequences_have_the_same_scores_and_gradients(model_type: str, tied: bool) -> None:
    model = small_model(config=small_architecture(model_type, tie_word_embeddings=tied), std=0.1).requires_grad_(True)
    rows = make_rows()
    packed, padded = score_packed(model, torch.cat(rows), LENGTHS), score_padded(model, rows)
    assert_close(packed, padded, rtol=1e-6, atol=1e-6)
    parameters = list(model.parameters())
    found, expected = (torch.autograd.grad(each.sum(), parameters) for each in (packed, padded))
    largest = max(float(gradient.abs().max()) for gradient in expected)
    for one, other in zip(found, expected, strict=True):
        assert_close(one / largest, other / largest, rtol=0, atol=1e-6)


def test_a_segment_does_not_depend_on_its_neighbours() -> None:
    model = small_model()
    rows = make_rows()
    before = score_packed(model, torch.cat(rows), LENGTHS)
    rows[0], rows[3] = rows[0].flip(0), rows[3].flip(0)
    after = model(torch.cat(rows)[None], segments=build_segments(LENGTHS))
    alone = model(rows[2][None])
    assert_close(after[0, 10:14], alone[0])
    assert not torch.equal(before, score_packed(model, torch.cat(rows), LENGTHS))


def attend_as_torch_2_10(query: Any, key: Any, value: Any, cu_seq_q: Any, max_q: int, is_causal: bool = False) -> None:
    """Has the signature of varlen_attn in torch 2.10."""


def attend_as_torch_2_11(query: Any, *, scale: float | None = None, window_size: tuple[int, int] = (-1, -1)) -> None:
    """Has the signature of varlen_attn in torch 2.11, without unrelated options."""


def attend_as_torch_2_13(query: Any, *, window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False) -> None:
    """Has the signature of varlen_attn in torch 2.13, without unrelated options."""


@pytest.mark.parametrize(
    ("attention", "options"),
    [
        (attend_as_torch_2_10, {"is_causal": True}),
        (attend_as_torch_2_11, {"window_size": (-1, 0)}),
        (attend_as_torch_2_13, {"window_size": (-1, 0), "enable_gqa": True}),
    ],
)
def test_causal_attention_gets_the_options_of_each_torch_version(
    attention: Callable[..., Any], options: dict[str, Any]
) -> None:
    assert find_causal_options(attention) == options


def test_the_installed_torch_has_the_options_of_causal_attention() -> None:
    from torch.nn.attention.varlen import varlen_attn

    assert find_causal_options(varlen_attn).keys() <= inspect.signature(varlen_attn).parameters.keys()

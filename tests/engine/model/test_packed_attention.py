"""Tests: packed sequences give the scores and gradients of padded rows, and shared prompts those of whole sequences."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from asterism.engine.hf.architectures import ARCHITECTURES
from asterism.engine.model import packed_attention
from asterism.engine.model.causal_lm import CausalLM
from asterism.engine.model.packed_attention import attend_segments, build_families, build_segments, find_causal_options
from asterism.policies.losses.token_scores import ScoredTokens
from tests.engine.closeness import assert_close
from tests.engine.inference import varlen_stubs
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


# ---------------------------------------------------------------- shared prompts

FAMILIES = ((5, 3, 1), (7,), (4, 6, 2, 2))  # lengths of prompts and their responses


def draw_heads(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Draw queries of four heads, and keys and values of two."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(sum(map(sum, FAMILIES)), heads, 8) for heads in (4, 2, 2)]
    return [torch.randn(shape, generator=generator, dtype=dtype, requires_grad=True) for shape in shapes]


def attend_densely(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
    """Compute attention of the families with one mask."""
    mask_TT, first = torch.zeros(len(q_THD), len(q_THD), dtype=torch.bool), 0
    for prompt, *responses in FAMILIES:
        of_prompt = slice(first, first + prompt)
        for length in (prompt, *responses):
            own = slice(first, first + length)
            mask_TT[own, own] = torch.ones(length, length, dtype=torch.bool).tril()
            if own != of_prompt:
                mask_TT[own, of_prompt] = True
            first += length
    q, k, v = (each.transpose(0, 1)[None] for each in (q_THD, k_TKD, v_TKD))
    found = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask_TT, enable_gqa=True)
    return found[0].transpose(0, 1)


def assert_equal_attention(attend: Callable[..., Tensor]) -> None:
    """Compare results and gradients with those of one mask."""
    heads = draw_heads()
    found, expected = attend(*heads, build_families(FAMILIES)), attend_densely(*heads)
    assert_close(found, expected, rtol=0, atol=1e-12)
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(1), dtype=found.dtype)
    for one, other in zip(
        *(torch.autograd.grad((each * weights).sum(), heads) for each in (found, expected)), strict=True
    ):
        assert_close(one, other, rtol=0, atol=1e-12)


def test_responses_attend_to_their_prompt_and_to_themselves() -> None:
    assert_equal_attention(attend_segments)


def test_one_kernel_for_gpus_computes_the_same_attention() -> None:
    """A stand-in with the mask of torch's `varlen_attn` gets different offsets of queries and keys."""

    def attend_in_one_kernel(query: Tensor, key: Tensor, value: Tensor, *offsets: Any, is_causal: bool) -> Tensor:
        q_offsets, k_offsets, max_q, max_k = offsets
        assert is_causal
        assert (max_q, max_k) == (int(q_offsets.diff().max()), int(k_offsets.diff().max()))
        return varlen_stubs.attend(query, key, value, q_offsets, k_offsets, 8**-0.5)

    assert_equal_attention(partial(packed_attention._attend_in_one_kernel, attend_in_one_kernel))  # pyright: ignore[reportPrivateUsage]


def test_positions_continue_after_the_prompt() -> None:
    segments = build_families(((3, 2, 1), (2,)))
    assert segments.positions_T.tolist() == [0, 1, 2, 3, 4, 3, 0, 1]
    assert segments.offsets.tolist() == [0, 3, 5, 6, 8]


# ---------------------------------------------------------------- versions of torch


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

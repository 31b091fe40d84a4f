"""The kernels of the output head agree with float64, for hidden states and weights of several dtypes."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from asterism.policies.losses import token_scores
from asterism.policies.losses.head_kernels import (
    EagerHeadKernels,
    FusedHeadKernels,
    HeadKernels,
    compute_logits,
    count_block_logits,
    score_logits,
)
from asterism.policies.losses.logits_chunks import EAGER_LOGITS, FUSED_LOGITS, count_chunk_tokens, count_group_tokens
from asterism.policies.losses.token_scores import compute_token_scores
from tests.engine.closeness import assert_close

N, E, V = 11, 8, 23
KERNELS: list[HeadKernels] = [EagerHeadKernels(), FusedHeadKernels()]


def make_inputs(dtype: torch.dtype, spread: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden_NE = torch.randn(N, E, generator=generator, dtype=torch.float64) * spread
    weight_VE = torch.randn(V, E, generator=generator, dtype=torch.float64)
    targets_N = torch.randint(V, (N,), generator=generator)
    return hidden_NE.to(dtype).requires_grad_(), weight_VE.to(dtype).requires_grad_(), targets_N


def score_exactly(hidden_NE: Tensor, weight_VE: Tensor, targets_N: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    log_p_NV = torch.log_softmax(hidden_NE.double() @ weight_VE.double().t() / temperature, -1)
    return log_p_NV.gather(-1, targets_N[:, None]).squeeze(-1), -(log_p_NV.exp() * log_p_NV).sum(-1)


def combine(logprobs_N: Tensor, entropies_N: Tensor, entropy_factor: float) -> Tensor:
    factors_N = torch.linspace(-1, 2, N, dtype=logprobs_N.dtype)
    return (logprobs_N * factors_N).sum() + entropy_factor * (entropies_N * factors_N.flip(0)).sum()


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("entropy_factor", [0.0, 0.3])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk_tokens", [4, N])
def test_scores_and_gradients_are_those_of_a_softmax_in_float64(
    kernels: HeadKernels, entropy_factor: float, temperature: float, chunk_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_scores, "count_chunk_tokens", lambda *_: chunk_tokens)
    hidden_NE, weight_VE, targets_N = make_inputs(torch.float64)
    found = compute_token_scores(
        hidden_NE, weight_VE, targets_N, temperature, entropy_gradient=entropy_factor > 0, kernels=kernels
    )
    expected = score_exactly(hidden_NE, weight_VE, targets_N, temperature)
    assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert found.entropies_N.requires_grad == (entropy_factor > 0)
    inputs = [hidden_NE, weight_VE]
    gradients = [torch.autograd.grad(combine(*each, entropy_factor), inputs) for each in (found, expected)]
    assert_close(*gradients, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("vocab_size", "block"), [(23, 23), (96, 96), (192, 64), (151_936, 128), (3 << 12, 1024)])
def test_a_row_is_summed_in_blocks_of_a_power_of_two(vocab_size: int, block: int) -> None:
    assert count_block_logits(vocab_size) == block
    generator = torch.Generator().manual_seed(1)
    logits_CV = 40.0 * torch.randn(5, vocab_size, generator=generator, dtype=torch.float64)
    logits_CV[0] += 1e4  # exp(logit) overflows unless the maximum is subtracted
    logits_CV[1, : vocab_size - 1] = -1e4  # all blocks except the last add 0 to the sum
    targets_C = torch.randint(vocab_size, (5,), generator=generator)
    log_p_CV = torch.log_softmax(logits_CV / 0.7, -1)
    expected = (
        log_p_CV.gather(-1, targets_C[:, None]).squeeze(-1),
        -(log_p_CV.exp() * log_p_CV).sum(-1),
        torch.logsumexp(logits_CV / 0.7, -1),
    )
    assert_close(score_logits(logits_CV, targets_C, 0.7), expected, rtol=1e-12, atol=1e-10)


@pytest.mark.parametrize("kernels", KERNELS)
def test_float32_logits_of_bfloat16_inputs_have_the_error_of_float32(kernels: HeadKernels) -> None:
    hidden_NE, weight_VE, targets_N = make_inputs(torch.bfloat16, spread=3.0)
    expected, _ = score_exactly(hidden_NE, weight_VE, targets_N, 1.0)
    errors = {
        float32_logits: (
            compute_token_scores(hidden_NE, weight_VE, targets_N, float32_logits=float32_logits, kernels=kernels)
            .logprobs_N.double()
            .sub(expected)
            .abs()
            .mean()
            .item()
        )
        for float32_logits in (True, False)
    }
    assert errors[True] < 1e-5 < 1e-3 < errors[False]


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_float32_weight_is_cast_to_the_dtype_of_the_hidden_states_and_gets_a_float32_gradient(
    kernels: HeadKernels,
) -> None:
    hidden_NE, weight_VE, targets_N = make_inputs(torch.bfloat16)
    wide_VE = weight_VE.detach().float().add(1e-6).requires_grad_()  # rounds to weight_VE in bfloat16
    scores = [compute_token_scores(hidden_NE, each, targets_N, kernels=kernels) for each in (weight_VE, wide_VE)]
    assert torch.equal(scores[0].logprobs_N, scores[1].logprobs_N)
    (gradient,) = torch.autograd.grad(scores[1].logprobs_N.sum(), wide_VE)
    (narrow,) = torch.autograd.grad(scores[0].logprobs_N.sum(), weight_VE)
    assert gradient.dtype == torch.float32
    assert torch.equal(gradient.bfloat16(), narrow)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")  # torch's compiler uses this method
def test_the_code_compiled_for_a_second_temperature_serves_all_others() -> None:
    graphs: list[Any] = []

    def count_graph(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    kernels = FusedHeadKernels(partial(torch.compile, fullgraph=True, backend=count_graph))
    hidden_NE, weight_VE, targets_N = make_inputs(torch.float32)
    compiled: list[int] = []
    for temperature in (1.0, 0.7, 0.9, 1.3):
        logprobs_N, _ = compute_token_scores(hidden_NE, weight_VE, targets_N, temperature, kernels=kernels)
        logprobs_N.sum().backward()
        compiled.append(len(graphs))
        expected, _ = score_exactly(hidden_NE, weight_VE, targets_N, temperature)
        assert_close(logprobs_N, expected.float(), rtol=1e-5, atol=1e-5)
    assert compiled == [2, 4, 4, 4]  # two graphs (forward, backward) for the first temperature, two for all others
    torch.compiler.reset()


def test_logits_cast_in_blocks_equal_logits_cast_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden_NE, weight_VE, _ = make_inputs(torch.bfloat16)
    monkeypatch.setattr("asterism.policies.losses.head_kernels._CAST_BYTES", 5 * 4 * E)
    with torch.no_grad():
        found = compute_logits(hidden_NE, weight_VE, float32_logits=True)
    assert_close(found, (hidden_NE.double() @ weight_VE.double().t()).float(), rtol=1e-6, atol=1e-6)


def test_a_micro_batch_without_tokens_has_gradients_of_zero() -> None:
    hidden_NE, weight_VE, targets_N = make_inputs(torch.float32)
    scores = compute_token_scores(hidden_NE[:0], weight_VE, targets_N[:0])
    hidden, weight = torch.autograd.grad(scores.logprobs_N.sum(), [hidden_NE, weight_VE])
    assert not hidden.any() and not weight.any()


def test_groups_consist_of_whole_chunks_within_the_memory_limit() -> None:
    for vocab_size, memory in ((151_936, FUSED_LOGITS), (151_936, EAGER_LOGITS), (450, FUSED_LOGITS)):
        chunk = count_chunk_tokens(vocab_size, memory)
        group = count_group_tokens(vocab_size, chunk)
        assert group % chunk == 0
        assert chunk <= group
        assert group == chunk or 2 * group * vocab_size <= 1 << 30
    assert count_group_tokens(151_936, 512) == 3072

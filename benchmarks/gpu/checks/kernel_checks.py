"""Attention of packed sequences against attention of each sequence, and the output matrix against float64."""

from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.gpu.checks.measured import FLOAT32_LIMIT, Measured, compute_relative_error
from engine.model.packed_attention import attend_rows, attend_segments, build_segments
from policies.losses.token_scores import compute_token_scores

_LENGTHS = (300, 1, 64, 700)  # of packed sequences
_BFLOAT16_LIMIT = 2e-2  # of single kernels; on a CPU up to 0.003, up to 0.009 with 150,000 logits
_HEADS, _KV_HEADS, _HEAD_DIM = 8, 2, 128
# Mean difference of a log probability. Logits that are rounded to bfloat16 would cost 0.0015, float32 logits cost 1e-6.
_LOGPROB_LIMIT = 1e-5


def check_segments(device: torch.device) -> Iterator[Measured]:
    """In bfloat16, for which GPUs have one kernel for all sequences; the reference computes each one in float32."""
    draws = torch.Generator(device).manual_seed(0)
    shapes = [(sum(_LENGTHS), heads, _HEAD_DIM) for heads in (_HEADS, _KV_HEADS, _KV_HEADS)]
    given = [torch.randn(shape, device=device, generator=draws).to(torch.bfloat16) for shape in shapes]
    weights_THD = torch.randn(shapes[0], device=device, generator=draws)
    segments = build_segments(_LENGTHS)
    segments = segments._replace(offsets=segments.offsets.to(device))
    packed = [each.clone().requires_grad_() for each in given]
    out_THD = attend_segments(packed[0], packed[1], packed[2], segments)
    single = [each.float().requires_grad_() for each in given]
    parts = zip(*(each.split(_LENGTHS) for each in single), strict=True)
    expected_THD = torch.cat([attend_rows(*(part[None] for part in of_segment)).squeeze(0) for of_segment in parts])
    yield Measured("output", compute_relative_error(out_THD, expected_THD), _BFLOAT16_LIMIT)
    for output in (out_THD, expected_THD):
        (output.float() * weights_THD).sum().backward()
    for name, found, expected in zip(("q", "k", "v"), packed, single, strict=True):
        assert found.grad is not None
        assert expected.grad is not None
        yield Measured(f"gradient of {name}", compute_relative_error(found.grad, expected.grad), _BFLOAT16_LIMIT)


def check_head(device: torch.device, dtype: torch.dtype, *, is_quick: bool) -> Iterator[Measured]:
    """Against the same inputs in float64. The large vocabulary needs several chunks."""
    tokens, width, vocabulary = (200, 128, 2000) if is_quick else (900, 1024, 151_936)
    draws = torch.Generator(device).manual_seed(0)
    hidden_NE = torch.randn(tokens, width, device=device, generator=draws).to(dtype)
    weight_VE = (torch.randn(vocabulary, width, device=device, generator=draws) * 1.3 / width**0.5).to(dtype)
    targets_N = torch.randint(vocabulary, (tokens,), device=device, generator=draws)
    gradients_N = torch.randn(tokens, device=device, generator=draws)
    found = hidden_NE.requires_grad_(), weight_VE.requires_grad_()
    scores = compute_token_scores(*found, targets_N)
    (scores.logprobs_N * gradients_N).sum().backward()
    exact = hidden_NE.detach().double(), weight_VE.detach().double()
    logprobs_N, entropies_N, *gradients = _compute_exactly(*exact, targets_N, gradients_N.double())
    yield Measured("log probabilities", _mean_difference(scores.logprobs_N, logprobs_N), _LOGPROB_LIMIT)
    yield Measured("entropies", _mean_difference(scores.entropies_N, entropies_N), _LOGPROB_LIMIT)
    limit = FLOAT32_LIMIT if dtype == torch.float32 else _BFLOAT16_LIMIT
    for name, parameter, expected in zip(("hidden states", "matrix"), found, gradients, strict=True):
        assert parameter.grad is not None
        yield Measured(f"gradient of {name}", compute_relative_error(parameter.grad, expected), limit)


def _compute_exactly(hidden_NE: Tensor, weight_VE: Tensor, targets_N: Tensor, gradients_N: Tensor) -> list[Tensor]:
    """Log probabilities, entropies, and the gradients of hidden states and of the matrix."""
    log_p_NV = torch.log_softmax(hidden_NE @ weight_VE.t(), -1)
    p_NV = log_p_NV.exp()
    entropies_N = -(p_NV * log_p_NV).sum(-1)
    logprobs_N = log_p_NV.gather(-1, targets_N[:, None]).squeeze(-1)
    logit_gradients_NV = p_NV.mul_(-gradients_N[:, None]).scatter_add_(-1, targets_N[:, None], gradients_N[:, None])
    return [logprobs_N, entropies_N, logit_gradients_NV @ weight_VE, logit_gradients_NV.t() @ hidden_NE]


def _mean_difference(found: Tensor, expected: Tensor) -> float:
    return (found.detach().double() - expected).abs().mean().item()

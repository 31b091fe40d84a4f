"""Checks attention of packed sequences against attention of each sequence, and the output matrix against float64."""

from collections.abc import Iterator

import torch
from torch import Tensor

from asterism.engine.model.compiled_parts import compile_head_kernels
from asterism.engine.model.packed_attention import (
    Segments,
    attend_rows,
    attend_segments,
    build_families,
    build_segments,
)
from asterism.policies.losses.head_kernels import FusedHeadKernels, HeadKernels
from asterism.policies.losses.token_scores import EAGER_KERNELS, compute_token_scores
from benchmarks.gpu.checks.measured import FLOAT32_LIMIT, Measured, compute_relative_error

_LENGTHS = (300, 1, 64, 700)  # lengths of packed sequences
_FAMILIES = ((300, 40, 1, 200), (130,), (64, 330))  # lengths of prompts and of the responses to them
_BFLOAT16_LIMIT = 2e-2  # relative error of one kernel; a CPU has up to 0.003, and up to 0.009 with 150,000 logits
_HEADS, _KV_HEADS, _HEAD_DIM = 8, 2, 128
# Mean error of a log probability. Logits in bfloat16 would have an error of 0.0015; float32 logits have 1e-6.
_LOGPROB_LIMIT = 1e-5
_TEMPERATURE = 0.7
_BLOCK_TOKENS = 250  # tokens per block of the exact scores, which bounds the memory of float64 logits


def check_segments(device: torch.device) -> Iterator[Measured]:
    """Compare bfloat16 attention of packed sequences with float32 attention of each sequence."""
    return _compare_attention(build_segments(_LENGTHS), device)


def check_shared_prompts(device: torch.device) -> Iterator[Measured]:
    """Compare bfloat16 attention of prompts and their responses with float32 attention of whole sequences."""
    return _compare_attention(build_families(_FAMILIES), device)


def _compare_attention(segments: Segments, device: torch.device) -> Iterator[Measured]:
    segments = Segments._make(each.to(device) if isinstance(each, Tensor) else each for each in segments)
    draws = torch.Generator(device).manual_seed(0)
    shapes = [(sum(segments.lengths), heads, _HEAD_DIM) for heads in (_HEADS, _KV_HEADS, _KV_HEADS)]
    given = [torch.randn(shape, device=device, generator=draws).to(torch.bfloat16) for shape in shapes]
    weights_THD = torch.randn(shapes[0], device=device, generator=draws)
    packed = [each.clone().requires_grad_() for each in given]
    out_THD = attend_segments(packed[0], packed[1], packed[2], segments)
    single = [each.float().requires_grad_() for each in given]
    expected_THD = _attend_to_sequences(single[0], single[1], single[2], segments)
    yield Measured("output", compute_relative_error(out_THD, expected_THD), _BFLOAT16_LIMIT)
    for output in (out_THD, expected_THD):
        (output.float() * weights_THD).sum().backward()
    for name, found, expected in zip(("q", "k", "v"), packed, single, strict=True):
        assert found.grad is not None
        assert expected.grad is not None
        yield Measured(f"gradient of {name}", compute_relative_error(found.grad, expected.grad), _BFLOAT16_LIMIT)


def _attend_to_sequences(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, segments: Segments) -> Tensor:
    """Compute attention of each sequence with its prompt, and return the outputs of the segments."""
    keys_S = torch.arange(len(q_THD), device=q_THD.device) if segments.keys_S is None else segments.keys_S
    num_keys = (segments.offsets if segments.key_offsets is None else segments.key_offsets).diff().tolist()
    found: list[Tensor] = []
    for length, rows in zip(segments.lengths, keys_S.split(num_keys), strict=True):
        q, k, v = (each.index_select(0, rows)[None] for each in (q_THD, k_TKD, v_TKD))
        found.append(attend_rows(q, k, v)[0, -length:])
    return torch.cat(found)


def check_head(device: torch.device, dtype: torch.dtype, *, is_quick: bool) -> Iterator[Measured]:
    """Compare scores and gradients with float64. The large vocabulary needs several chunks, and on a GPU two groups."""
    tokens = 3700 if device.type == "cuda" else 700
    tokens, width, vocabulary = (200, 128, 2000) if is_quick else (tokens, 256, 151_936)
    draws = torch.Generator(device).manual_seed(0)
    hidden_NE = torch.randn(tokens, width, device=device, generator=draws).to(dtype)
    weight_VE = (torch.randn(vocabulary, width, device=device, generator=draws) * 1.3 / width**0.5).to(dtype)
    targets_N = torch.randint(vocabulary, (tokens,), device=device, generator=draws)
    factors_2N = torch.randn(2, tokens, device=device, generator=draws)
    exact = [each.double().requires_grad_() for each in (hidden_NE, weight_VE)]
    logprobs_N, entropies_N = _score_exactly(exact[0], exact[1], targets_N, factors_2N.double())
    limit = FLOAT32_LIMIT if dtype == torch.float32 else _BFLOAT16_LIMIT
    for name, kernels in _list_kernels(device).items():
        found = [each.clone().requires_grad_() for each in (hidden_NE, weight_VE)]
        scores = compute_token_scores(
            found[0], found[1], targets_N, _TEMPERATURE, entropy_gradient=True, kernels=kernels
        )
        (torch.stack(scores) * factors_2N).sum().backward()
        error = _mean_difference(scores.logprobs_N, logprobs_N)
        yield Measured(f"{name}: log probabilities", error, _LOGPROB_LIMIT)
        yield Measured(f"{name}: entropies", _mean_difference(scores.entropies_N, entropies_N), _LOGPROB_LIMIT)
        for part, parameter, expected in zip(("hidden states", "matrix"), found, exact, strict=True):
            assert parameter.grad is not None and expected.grad is not None
            error = compute_relative_error(parameter.grad, expected.grad)
            yield Measured(f"{name}: gradient of {part}", error, limit)


def _list_kernels(device: torch.device) -> dict[str, HeadKernels]:
    """Return the kernels by name. On a CPU the fused kernels run without compilation."""
    fused = compile_head_kernels() if device.type == "cuda" else FusedHeadKernels()
    return {"eager": EAGER_KERNELS, "fused": fused}


def _score_exactly(
    hidden_NE: Tensor, weight_VE: Tensor, targets_N: Tensor, factors_2N: Tensor
) -> tuple[Tensor, Tensor]:
    """Return log probabilities and entropies; add the gradients of their weighted sums to the inputs."""
    found: list[Tensor] = []
    blocks = zip(
        hidden_NE.split(_BLOCK_TOKENS), targets_N.split(_BLOCK_TOKENS), factors_2N.split(_BLOCK_TOKENS, 1), strict=True
    )
    for hidden_CE, targets_C, factors_2C in blocks:
        log_p_CV = torch.log_softmax(hidden_CE @ weight_VE.t() / _TEMPERATURE, -1)
        logprobs_C = log_p_CV.gather(-1, targets_C[:, None]).squeeze(-1)
        scores_2C = torch.stack((logprobs_C, -(log_p_CV.exp() * log_p_CV).sum(-1)))
        (scores_2C * factors_2C).sum().backward()
        found.append(scores_2C.detach())
    logprobs_N, entropies_N = torch.cat(found, 1)
    return logprobs_N, entropies_N


def _mean_difference(found: Tensor, expected: Tensor) -> float:
    return (found.detach().double() - expected).abs().mean().item()

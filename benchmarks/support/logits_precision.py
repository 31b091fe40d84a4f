"""Errors and cost of the dtype of logits (learner.head_dtype), for a model in bfloat16 on a CPU."""

import statistics
import time

import torch
from torch import Tensor

from policies.losses.token_scores import compute_token_scores

SPREADS = (1.3, 3.0, 8.0)
DTYPES = {"bfloat16": False, "float32": True}
TOKENS, WIDTH, VOCABULARY = 256, 1024, 32_768
# Tokens, width and vocabulary of benchmarks.learner's model with 17M parameters, of a model with 135M, and of Qwen3.
COST_SHAPES = ((1536, 512, 2048), (512, 576, 49_152), (256, 1024, 151_936))


def make_inputs(tokens: int, width: int, vocabulary: int, spread: float) -> tuple[Tensor, Tensor, Tensor]:
    hidden_NE = torch.randn(tokens, width).to(torch.bfloat16)
    weight_VE = (torch.randn(vocabulary, width) * (spread / width**0.5)).to(torch.bfloat16)
    return hidden_NE.requires_grad_(), weight_VE.requires_grad_(), torch.randint(vocabulary, (tokens,))


@torch.no_grad()
def measure_errors(tokens: int, vocabulary: int) -> dict[str, float]:
    figures: dict[str, float] = {}
    for spread in SPREADS:
        hidden_NE, weight_VE, targets_N = make_inputs(tokens, WIDTH, vocabulary, spread)
        exact_NV = torch.log_softmax(hidden_NE.double() @ weight_VE.double().t(), -1)
        exact_N = exact_NV.gather(-1, targets_N[:, None]).squeeze(-1)
        for name, float32_logits in DTYPES.items():
            scores = compute_token_scores(hidden_NE, weight_VE, targets_N, float32_logits=float32_logits)
            errors_N = (scores.logprobs_N - exact_N).abs()
            figures[f"logits_error_{name}_{spread}"] = float(errors_N.mean())
            figures[f"logits_worst_{name}_{spread}"] = float(errors_N.max())
    return figures


def measure_cost(tokens: int, width: int, vocabulary: int, rounds: int) -> float:
    hidden_NE, weight_VE, targets_N = make_inputs(tokens, width, vocabulary, 1.0)
    seconds: dict[str, list[float]] = {name: [] for name in DTYPES}
    for _ in range(rounds + 1):  # the first round does not count
        for name, float32_logits in DTYPES.items():
            began = time.process_time()
            scores = compute_token_scores(hidden_NE, weight_VE, targets_N, float32_logits=float32_logits)
            torch.autograd.grad(scores.logprobs_N.sum(), [hidden_NE, weight_VE])
            seconds[name].append(time.process_time() - began)
    pairs = zip(seconds["float32"][1:], seconds["bfloat16"][1:], strict=True)
    return statistics.median(one / other for one, other in pairs)


def measure_logits(seed: int, rounds: int, *, quick: bool) -> dict[str, float]:
    """`quick`: few tokens, one round, and the smallest model."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    figures = measure_errors(32, 2048) if quick else measure_errors(TOKENS, VOCABULARY)
    for shape in COST_SHAPES[:1] if quick else COST_SHAPES:
        figures[f"logits_cost_{shape[-1]}"] = measure_cost(*shape, 1 if quick else rounds)
    torch.set_num_threads(threads)
    return figures

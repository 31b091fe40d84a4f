"""Measure gradients under noise in the engine's log probabilities, and errors of logits by dtype. Prints JSON last.

    python -m benchmarks.mismatch [--seed 0] [--quick]

A random model samples sequences. The log probabilities of the "engine" are exact values plus noise. The true gradient
has no noise. Columns: the engine's log probabilities as the old ones ("engine"), and recomputed ones with each
correction. Rows (differences in nats):

    small     normal noise, sigma 0.02
    some      the same, and 0.2 % of the tokens off by 1 to 3
    far       the same, and 0.2 % of the tokens off by 2.5 to 7.5
    many      normal noise, sigma 0.05, and 1 % of the tokens off by 1.5 to 4.5
    overflow  small, and one token off by 100

Keys: `cosine.CORRECTION.ROW` between the computed and the true gradient, `norm.CORRECTION.ROW` (ratio of the norms), and
`finite.CORRECTION` for the row overflow.

For a model in bfloat16 with logits of standard deviation SD, in float32 or bfloat16 (learner.head_dtype):

    logits_error_DTYPE_SD   mean absolute error of a log probability against float64, in nats; logits_worst_DTYPE_SD: largest
    logits_cost_VOCABULARY  CPU seconds of forward and backward pass of the head with float32 logits, over seconds with
                            bfloat16 logits; the median over eight rounds, in which both take turns
"""

import time
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asterism.configs.schema.algorithm import RlConfig
from asterism.configs.schema.learner_config import LearnerConfig, LossConfig
from asterism.configs.schema.run_config import RunConfig
from asterism.engine.hf.model_config import DecoderConfig
from asterism.engine.learner.batches.training_sequence import TrainingSequence, build_training_sequence
from asterism.engine.learner.distributed import RankGroup
from asterism.engine.learner.trainer import Trainer
from asterism.engine.model.causal_lm import CausalLM, initialize_weights
from asterism.policies.losses.token_scores import compute_token_scores
from benchmarks.support.benchmark_main import (
    SEED,
    Options,
    alternate,
    benchmark_main,
    compute_median_ratio,
    show_figures,
)

CORRECTIONS: dict[str, dict[str, Any]] = {
    "engine": {"old_logprobs": "engine", "correction": "none"},
    **{kind: {"old_logprobs": "recomputed", "correction": kind} for kind in ("none", "tis", "icepop", "decoupled")},
}
# Standard deviation of the noise, share of the outliers, their lowest and highest distance.
ROWS = {
    "small": (0.02, 0.0, 0.0, 0.0),
    "some": (0.02, 0.002, 1.0, 3.0),
    "far": (0.02, 0.002, 2.5, 7.5),
    "many": (0.05, 0.01, 1.5, 4.5),
    "overflow": (0.02, 0.0, 0.0, 0.0),
}
PROMPT_TOKENS = 4
GROUP_SIZE = 8
VOCABULARY = 256
LOGIT_SPREADS = (1.3, 3.0, 8.0)
LOGIT_DTYPES = {"bfloat16": False, "float32": True}
LOGIT_TOKENS, LOGIT_WIDTH, LOGIT_VOCABULARY = 256, 1024, 32_768
# Tokens, width and vocabulary of benchmarks.learner's model with 17M parameters, of a model with 135M, and of Qwen3.
COST_SHAPES = ((1536, 512, 2048), (512, 576, 49_152), (256, 1024, 151_936))


class GradientRecorder(Trainer):
    """A trainer that keeps the gradient instead of updating the weights."""

    gradient: torch.Tensor

    def _apply_gradients(self, lr_scale: float) -> float:
        parameters = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        self.gradient = torch.cat(
            [parameter.grad.flatten().double() for parameter in parameters if parameter.grad is not None]
        )
        for parameter in parameters:
            parameter.grad = None
        return float(self.gradient.norm())


def make_model(seed: int) -> CausalLM:
    model = CausalLM(
        DecoderConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=128,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            head_dim=16,
            tie_word_embeddings=True,
        )
    )
    initialize_weights(model, seed, std=0.15)
    return model


@torch.no_grad()
def sample_sequences(
    model: CausalLM, count: int, tokens: int, seed: int
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Return token ids [count, PROMPT_TOKENS + tokens] and exact log probabilities, which are 0 in the prompt."""
    generator = torch.Generator().manual_seed(seed)
    ids_BT = torch.randint(VOCABULARY, (count, PROMPT_TOKENS), generator=generator)
    for _ in range(tokens):
        p_BV = torch.softmax(model.compute_logits(model(ids_BT)[:, -1]), dim=-1)
        ids_BT = torch.cat([ids_BT, torch.multinomial(p_BV, 1, generator=generator)], dim=1)
    log_p_BTV = torch.log_softmax(model.compute_logits(model(ids_BT[:, :-1])).double(), dim=-1)
    logprobs_BT = log_p_BTV.gather(-1, ids_BT[:, 1:, None])[..., 0]
    logprobs_BT[:, : PROMPT_TOKENS - 1] = 0
    exact_BT = torch.cat([torch.zeros(count, 1, dtype=torch.float64), logprobs_BT], dim=1)
    return ids_BT.numpy().astype(np.int32), exact_BT.numpy().astype(np.float32)


def make_noise(row: str, shape: tuple[int, int], draws: np.random.Generator) -> NDArray[np.float32]:
    sigma, share, low, high = ROWS[row]
    noise = draws.normal(0, sigma, shape)
    outliers = draws.random(shape) < share
    noise += outliers * draws.choice((-1.0, 1.0), shape) * draws.uniform(low, high, shape)
    if row == "overflow":
        noise[0, PROMPT_TOKENS] = -100.0
    return noise.astype(np.float32)


def make_sequences(ids: NDArray[np.int32], logprobs: NDArray[np.float32], seed: int) -> list[TrainingSequence]:
    """Make sequences with advantages of +-1, in equal parts."""
    signs = np.random.default_rng(seed).permutation(np.resize((1.0, -1.0), len(ids)))
    mask = np.arange(ids.shape[1]) >= PROMPT_TOKENS
    masked = (logprobs * mask).astype(np.float32)
    return [
        build_training_sequence(ids[number], mask, masked[number], float(signs[number]), number // GROUP_SIZE, number)
        for number in range(len(ids))
    ]


def compute_gradient(model_seed: int, settings: dict[str, Any], sequences: list[TrainingSequence]) -> torch.Tensor:
    learner = LearnerConfig(minibatches=1, loss=LossConfig(mismatch_limit=0.0, **settings))
    trainer = GradientRecorder(
        make_model(model_seed), RunConfig(name="mismatch", rl=RlConfig(steps=1), learner=learner), RankGroup()
    )
    trainer.run_rl_step(sequences)
    return trainer.gradient


def measure_gradients(seed: int, sequences: int, tokens: int) -> dict[str, float | bool]:
    draws = np.random.default_rng(seed)
    ids, exact = sample_sequences(make_model(seed), sequences, tokens, seed)
    true = compute_gradient(seed, CORRECTIONS["none"], make_sequences(ids, exact, seed))
    figures: dict[str, float | bool] = {}
    for row in ROWS:
        noisy = make_sequences(ids, exact + make_noise(row, (sequences, PROMPT_TOKENS + tokens), draws), seed)
        for correction, settings in CORRECTIONS.items():
            gradient = compute_gradient(seed, settings, noisy)
            if row == "overflow":
                figures[f"finite.{correction}"] = bool(torch.isfinite(gradient).all())
                continue
            figures[f"cosine.{correction}.{row}"] = float(torch.cosine_similarity(gradient, true, dim=0))
            figures[f"norm.{correction}.{row}"] = float(gradient.norm() / true.norm())
    return figures


# ---------------------------------------------------------------- dtypes of logits


def make_head_inputs(tokens: int, width: int, vocabulary: int, spread: float) -> tuple[Tensor, Tensor, Tensor]:
    hidden_NE = torch.randn(tokens, width).to(torch.bfloat16)
    weight_VE = (torch.randn(vocabulary, width) * (spread / width**0.5)).to(torch.bfloat16)
    return hidden_NE.requires_grad_(), weight_VE.requires_grad_(), torch.randint(vocabulary, (tokens,))


@torch.no_grad()
def measure_logit_errors(tokens: int, vocabulary: int) -> dict[str, float]:
    figures: dict[str, float] = {}
    for spread in LOGIT_SPREADS:
        hidden_NE, weight_VE, targets_N = make_head_inputs(tokens, LOGIT_WIDTH, vocabulary, spread)
        exact_NV = torch.log_softmax(hidden_NE.double() @ weight_VE.double().t(), -1)
        exact_N = exact_NV.gather(-1, targets_N[:, None]).squeeze(-1)
        for name, float32_logits in LOGIT_DTYPES.items():
            scores = compute_token_scores(hidden_NE, weight_VE, targets_N, float32_logits=float32_logits)
            errors_N = (scores.logprobs_N - exact_N).abs()
            figures[f"logits_error_{name}_{spread}"] = float(errors_N.mean())
            figures[f"logits_worst_{name}_{spread}"] = float(errors_N.max())
    return figures


def measure_logit_cost(tokens: int, width: int, vocabulary: int, rounds: int) -> float:
    hidden_NE, weight_VE, targets_N = make_head_inputs(tokens, width, vocabulary, 1.0)

    def run_passes(float32_logits: bool) -> float:
        began = time.process_time()
        scores = compute_token_scores(hidden_NE, weight_VE, targets_N, float32_logits=float32_logits)
        torch.autograd.grad(scores.logprobs_N.sum(), [hidden_NE, weight_VE])
        return time.process_time() - began

    ways = {name: partial(run_passes, float32_logits) for name, float32_logits in LOGIT_DTYPES.items()}
    seconds = alternate(ways, rounds + 1)  # the first round does not count
    return compute_median_ratio(seconds["float32"][1:], seconds["bfloat16"][1:])


def measure_logits(seed: int, rounds: int, *, quick: bool) -> dict[str, float]:
    """Measure the dtypes of logits. With `quick`, there are few tokens, one round, and only the smallest model."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    figures = measure_logit_errors(32, 2048) if quick else measure_logit_errors(LOGIT_TOKENS, LOGIT_VOCABULARY)
    for shape in COST_SHAPES[:1] if quick else COST_SHAPES:
        figures[f"logits_cost_{shape[-1]}"] = measure_logit_cost(*shape, 1 if quick else rounds)
    torch.set_num_threads(threads)
    return figures


def measure(options: Options) -> dict[str, float | bool]:
    figures = measure_gradients(options.seed, *((32, 24) if options.quick else (192, 48)))
    print(f"seed {options.seed}; cosine (ratio of the norms)")
    print(f"{'':10}" + "".join(f"{correction:>18}" for correction in CORRECTIONS))
    for row in ROWS:
        if row != "overflow":
            cells = [
                f"{figures[f'cosine.{each}.{row}']:.4f} ({figures[f'norm.{each}.{row}']:.2f})" for each in CORRECTIONS
            ]
            print(f"{row:10}" + "".join(f"{cell:>18}" for cell in cells))
    logits = measure_logits(options.seed, rounds=8, quick=options.quick)
    show_figures(logits)
    return {"seed": options.seed, **figures, **logits}


if __name__ == "__main__":
    benchmark_main(__doc__, measure, SEED, quick="fewer and shorter sequences, with noisier figures")

"""Small random models and tokenizers for tests of the engine."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from asterism.engine.contract import Generation, GenerationRequest
from asterism.engine.export.hf_export import save_model
from asterism.engine.hf.architectures import ARCHITECTURES
from asterism.engine.hf.model_config import DecoderConfig, ExpertsConfig
from asterism.engine.inference.kernels.batch_invariance import find_batch_invariant_matmul
from asterism.engine.inference.kernels.matmul import Matmul
from asterism.engine.model.causal_lm import CausalLM, initialize_weights
from asterism.engine.model.packed_attention import build_segments
from asterism.policies.losses.token_scores import ScoredTokens

VOCABULARY = 97


def small_config(
    *, num_kv_heads: int = 2, tie_word_embeddings: bool = True, vocab_size: int = VOCABULARY, **options: Any
) -> DecoderConfig:
    """Make a small config. `options`: more fields of DecoderConfig."""
    return DecoderConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=num_kv_heads,
        head_dim=16,
        tie_word_embeddings=tie_word_embeddings,
        **options,
    )


def small_architecture(model_type: str, **options: Any) -> DecoderConfig:
    """Make a small config of an architecture. With experts, the first of its two layers has a single MLP."""
    experts = ExpertsConfig(
        num_experts=8, experts_per_token=3, expert_size=24, normalizes_weights=True, dense_layers=(0,)
    )
    has_experts = ARCHITECTURES[model_type].has_experts
    return small_config(**{"experts": experts if has_experts else None, **options}, model_type=model_type)


def small_model(
    seed: int = 0, config: DecoderConfig | None = None, *, vocab_size: int = VOCABULARY, std: float = 0.3
) -> CausalLM:
    """Make a model with large random weights, so that logits differ clearly. Norm weights and biases are random too."""
    model = CausalLM(config or small_config(vocab_size=vocab_size))
    initialize_weights(model, seed, std)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5, generator=generator)
    return model.requires_grad_(False)


@cache
def get_batch_invariant_matmul(config: DecoderConfig) -> Matmul:
    """Return products for tests that compare bits. Plain products are not batch-invariant on every processor."""
    return find_batch_invariant_matmul(config, 768, 256)


def score_packed(model: CausalLM, token_ids_T: Tensor, lengths: Sequence[int]) -> Tensor:
    """Compute log probabilities, [T], of other tokens after each of the packed tokens."""
    tokens = ScoredTokens(torch.arange(len(token_ids_T)), token_ids_T.flip(0))
    scores: Any = model(token_ids_T[None], tokens=tokens, segments=build_segments(lengths))
    return scores.logprobs_N


def compute_logprobs(model: CausalLM, asked: GenerationRequest, found: Generation) -> Tensor:
    """Return the learner's log-probabilities of all tokens at each generated position, [N, V]; greedy: temperature 1."""
    ids = torch.from_numpy(np.concatenate((asked.token_ids, found.token_ids))).long()
    with torch.no_grad():
        logits = model.compute_logits(model(ids[None])[0, len(asked.token_ids) - 1 : -1])
    return (logits / (asked.sampling.temperature or 1.0)).log_softmax(-1)


def measure_errors(model: CausalLM, asked: GenerationRequest, found: Generation) -> Tensor:
    """Return the absolute error of each generated token's logprob, [N], relative to the learner's model."""
    expected = compute_logprobs(model, asked, found).gather(-1, torch.from_numpy(found.token_ids).long()[:, None])
    return (expected[:, 0] - torch.from_numpy(found.logprobs)).abs()


def random_ids(length: int, seed: int) -> NDArray[np.int32]:
    return np.random.default_rng(seed).integers(0, VOCABULARY, length, dtype=np.int32)


def write_tokenizer(folder: Path, vocab_size: int = 280) -> None:
    """Write a byte-level BPE tokenizer with ChatML's tokens, an added word, and a `<tool_call>` that is not special."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(_train_tokenizer(vocab_size))


@cache
def _train_tokenizer(vocab_size: int) -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 2,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog", "print(1 + 1)"] * 4, trainer)
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False), AddedToken("print(", special=False)])
    return tokenizer.to_str(pretty=True)


def save_small_model(folder: Path, model: CausalLM | None = None, name: str = "model") -> Path:
    """Write `folder`/tokenizer, and a transformers folder `folder`/`name` of this model or of one for the tokenizer."""
    model = model or small_model(vocab_size=280)
    write_tokenizer(folder / "tokenizer")
    save_model(folder / name, model.config, model.state_dict(), folder / "tokenizer")
    return folder / name

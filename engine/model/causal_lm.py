"""The decoder-only architectures of engine/hf/architectures.py for training, with transformers' parameter names.

The embedded engine decodes with the same weights (engine/inference/decoder.py). Tests compare both
with transformers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from asterism.configs.schema.learner_config import Checkpointing
from asterism.engine.hf.model_config import DecoderConfig
from asterism.engine.model.compiled_parts import compile_head_kernels, run_compiled, run_eagerly
from asterism.engine.model.experts import SparseMlp
from asterism.engine.model.layers import Attention, Mlp, RmsNorm, UninitializedEmbedding, UninitializedLinear
from asterism.engine.model.packed_attention import Segments, attend
from asterism.engine.model.recomputation import run_recomputed
from asterism.engine.model.rope import compute_rope_tables
from asterism.policies.losses.head_kernels import HeadKernels
from asterism.policies.losses.token_scores import EAGER_KERNELS, ScoredTokens, TokenScores, compute_token_scores


class PartCheckpoints(NamedTuple):
    """The checkpointing of each part of a layer: the activations that the backward pass recomputes."""

    until_attention: Checkpointing  # one checkpoint around the first part and attention
    in_project: Checkpointing
    in_finish: Checkpointing


_WITHOUT_CHECKPOINTS = PartCheckpoints("none", "none", "none")
# A checkpoint around compiled code sees none of its products. So compiled parts contain the checkpoints: torch then
# recomputes only the activations that the part's backward pass reads.
_COMPILED_CHECKPOINTS: dict[Checkpointing, PartCheckpoints] = {
    "none": _WITHOUT_CHECKPOINTS,
    "selective": PartCheckpoints("none", "selective", "selective"),
    "attention": PartCheckpoints("attention", "none", "full"),
}


class DecoderLayer(nn.Module):
    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        width = config.hidden_size
        self.self_attn = Attention(config)
        if config.experts is not None and config.has_experts(layer):
            self.mlp = SparseMlp(width, config.experts)
        else:
            self.mlp = Mlp(width, config.intermediate_size)
        self.input_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)

        self.recomputed: Checkpointing = "none"  # activations that the backward pass recomputes to save memory
        self.is_compiled = False

    def forward(self, x_BTE: Tensor, cos: Tensor, sin: Tensor, segments: Segments | None) -> Tensor:
        """Return [B, T, E]. For the backward pass, FSDP gathers the parameters before this module recomputes."""
        if not self.is_compiled:
            return run_recomputed(self.recomputed, self._compute, _WITHOUT_CHECKPOINTS, x_BTE, cos, sin, segments)
        if self.recomputed == "full":
            return run_recomputed("full", self._compute, _WITHOUT_CHECKPOINTS, x_BTE, cos, sin, segments)
        return self._compute(_COMPILED_CHECKPOINTS[self.recomputed], x_BTE, cos, sin, segments)

    def _compute(
        self, checkpoints: PartCheckpoints, x_BTE: Tensor, cos: Tensor, sin: Tensor, segments: Segments | None
    ) -> Tensor:
        out_BTHD = run_recomputed(
            checkpoints.until_attention, self._project_and_attend, checkpoints.in_project, x_BTE, cos, sin, segments
        )
        # A part with experts is not compiled, because it reads the number of tokens of each expert.
        run = run_compiled if self.is_compiled and not isinstance(self.mlp, SparseMlp) else run_eagerly
        return run(DecoderLayer.finish, checkpoints.in_finish, self, x_BTE, out_BTHD)

    def _project_and_attend(
        self, recomputed: Checkpointing, x_BTE: Tensor, cos: Tensor, sin: Tensor, segments: Segments | None
    ) -> Tensor:
        """Return [B, T, H, D]. Attention is not compiled: torch would compile it for each length of a segment."""
        run = run_compiled if self.is_compiled else run_eagerly
        q_BTHD, k_BTKD, v_BTKD = run(DecoderLayer.project, recomputed, self, x_BTE, cos, sin)
        return run_recomputed(self._choose_around_attention(q_BTHD, segments), attend, q_BTHD, k_BTKD, v_BTKD, segments)

    def _choose_around_attention(self, q_BTHD: Tensor, segments: Segments | None) -> Checkpointing:
        """Return "attention" if the backward pass would otherwise keep copies of prompts' keys for each response."""
        has_copies = q_BTHD.is_cuda and segments is not None and segments.keys_S is not None
        is_inside_checkpoint = self.recomputed != "none" and not (self.is_compiled and self.recomputed == "selective")
        return "attention" if has_copies and not is_inside_checkpoint else "none"

    def project(self, x_BTE: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute queries, keys and values: the part before attention."""
        return self.self_attn.project(self.input_layernorm(x_BTE), cos, sin)

    def finish(self, x_BTE: Tensor, out_BTHD: Tensor) -> Tensor:
        """Compute the part after attention."""
        x_BTE = x_BTE + self.self_attn.o_proj(out_BTHD.flatten(2))
        return x_BTE + self.mlp(self.post_attention_layernorm(x_BTE))


class Backbone(nn.Module):
    """All layers except the output matrix, as a module for the name prefix `model.`."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = UninitializedEmbedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([DecoderLayer(config, layer) for layer in range(config.num_layers)])
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.compute_dtype: torch.dtype | None = None  # dtype of activations; None: dtype of the embedding

    def forward(self, token_ids_BT: Tensor, positions_BT: Tensor, segments: Segments | None) -> Tensor:
        x_BTE = self.embed_tokens(token_ids_BT)
        x_BTE = x_BTE.to(self.compute_dtype or x_BTE.dtype)
        tables = compute_rope_tables(positions_BT, self.config)
        cos, sin = (table.to(x_BTE.dtype).unsqueeze(2) for table in tables)
        for layer in self.layers:
            x_BTE = layer(x_BTE, cos, sin, segments)
        return self.norm(x_BTE)


class OutputHead(UninitializedLinear):
    """The output matrix of an untied model. One call computes all chunks of scores: FSDP gathers the matrix once."""

    def forward(self, hidden_NE: Tensor, tokens: ScoredTokens, kernels: HeadKernels) -> TokenScores:  # pyright: ignore[reportIncompatibleMethodOverride]
        return score_tokens(hidden_NE, self.weight, tokens, kernels)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return functional.linear(hidden, self.weight.to(hidden.dtype))


class CausalLM(nn.Module):
    """A model for training. Its weights are uninitialized until `initialize_weights` or `fill_parameters`."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Backbone(config)
        head_sizes = config.hidden_size, config.vocab_size
        self.lm_head = None if config.tie_word_embeddings else OutputHead(*head_sizes, bias=False)
        self._is_compiled = False

    def forward(
        self,
        token_ids_BT: Tensor,
        positions_BT: Tensor | None = None,
        tokens: ScoredTokens | None = None,
        segments: Segments | None = None,
    ) -> Tensor | TokenScores:
        """Return hidden states after the last norm, [B, T, E], or the scores of `tokens`.

        Each row is a sequence and can be right-padded; with `segments`, the only row contains several sequences.
        A sharded model (asterism.engine.learner.sharding) has its output matrix only during this call.
        """
        if segments is not None:
            positions_BT = segments.positions_T[None]
        elif positions_BT is None:
            positions_BT = torch.arange(token_ids_BT.shape[1], device=token_ids_BT.device)[None]
        hidden_BTE = self.model(token_ids_BT, positions_BT, segments)
        if tokens is None:
            return hidden_BTE
        hidden_NE = hidden_BTE.flatten(0, 1).index_select(0, tokens.positions_N)
        kernels = compile_head_kernels() if self._is_compiled and hidden_NE.is_cuda else EAGER_KERNELS
        if self.lm_head is not None:
            return self.lm_head(hidden_NE, tokens, kernels)
        return score_tokens(hidden_NE, self.model.embed_tokens.weight, tokens, kernels)

    def set_compute_dtype(self, dtype: torch.dtype) -> None:
        """Set the dtype of activations and products. Parameters keep their dtype; each pass converts them."""
        self.model.compute_dtype = dtype

    def set_recomputed(self, recomputed: Checkpointing) -> None:
        """Set which activations of the layers the backward pass recomputes."""
        for layer in self.model.layers:
            assert isinstance(layer, DecoderLayer)
            layer.recomputed = recomputed

    def set_compiled(self, is_compiled: bool) -> None:
        """Set whether torch.compile compiles the layers, except attention and experts, and on a GPU the pointwise part
        of the output head (engine/model/compiled_parts.py).
        """
        self._is_compiled = is_compiled
        for layer in self.model.layers:
            assert isinstance(layer, DecoderLayer)
            layer.is_compiled = is_compiled

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return logits [..., V] of hidden states [..., E]. The model must not be sharded."""
        if self.lm_head is not None:
            return self.lm_head.compute_logits(hidden)
        return functional.linear(hidden, self.model.embed_tokens.weight.to(hidden.dtype))


def score_tokens(hidden_NE: Tensor, weight_VE: Tensor, tokens: ScoredTokens, kernels: HeadKernels) -> TokenScores:
    return compute_token_scores(
        hidden_NE,
        weight_VE,
        tokens.targets_N,
        tokens.temperature,
        entropy_gradient=tokens.entropy_gradient,
        float32_logits=tokens.float32_logits,
        kernels=kernels,
    )


def initialize_weights(model: CausalLM, seed: int, std: float = 0.02) -> None:
    """Set initial weights as transformers does: matrices from N(0, std), norms 1, biases 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(0.0 if name.endswith(".bias") else 1.0)
            else:
                parameter.copy_(torch.empty(parameter.shape).normal_(0.0, std, generator=generator))

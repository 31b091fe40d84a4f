"""The model for generation: it computes like engine/model/causal_lm.py, with fused weights and a paged KV cache.

One pass reads tokens of several sequences: one token of each running sequence, and chunks of prompts.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from asterism.engine.inference.buffer_sizes import MIN_ROWS
from asterism.engine.inference.fused_weights import FusedWeights, LayerWeights, MlpWeights
from asterism.engine.inference.kernels.attention import CachedAttention
from asterism.engine.inference.kernels.matmul import PLAIN, Matmul, compute_logits
from asterism.engine.inference.kv.kv_cache import KeyValueCache
from asterism.engine.model.experts import multiply_grouped, route
from asterism.engine.model.rope import apply_rope, compute_rope_tables


class ForwardBatch(NamedTuple):
    """N tokens to read, one per row; the pass returns logits of the first B rows.

    Rows can be in any order: each layer writes the keys and values of all rows before attention reads them.
    """

    token_ids: Tensor  # int64 [N]
    positions: Tensor  # int64 [N]
    slots: Tensor  # int64 [N], slots for keys and values: page * page_tokens + offset in the page
    decode_blocks: Sequence[Any]  # attention's blocks for the rows [0, B)
    prefill_blocks: Sequence[Any]  # attention's blocks for the rows [B, N)


class Decoder:
    def __init__(
        self,
        weights: FusedWeights,
        cache: KeyValueCache,
        attention: CachedAttention,
        max_sequence_tokens: int,
        matmul: Matmul = PLAIN,
    ) -> None:
        config, embedding = weights.config, weights.embedding
        self.config, self._weights = config, weights
        self._cache, self._attention = cache, attention
        self._mm, self._add_mm = matmul.mm, matmul.add_mm
        self._num_queries = config.num_heads
        self._num_rotated = config.num_heads + config.num_kv_heads
        positions = torch.arange(max_sequence_tokens, device=embedding.device)
        tables = compute_rope_tables(positions, config)
        self._cos, self._sin = (table.to(embedding.dtype).unsqueeze(1) for table in tables)

    def forward(self, batch: ForwardBatch) -> Tensor | None:
        """Return logits, float32 [B, V], or None if B is 0. Writes the keys and values of all rows to the cache."""
        num_decode_rows, blocks = (
            len(batch.decode_blocks) and batch.decode_blocks[-1].end,
            [*batch.decode_blocks, *batch.prefill_blocks],
        )
        token_ids, positions, slots = self._pad_inputs(batch)
        cos, sin = self._cos[positions], self._sin[positions]
        addresses, plans = self._cache.compute_addresses(slots), self._attention.plan(positions, blocks)
        x = functional.embedding(token_ids, self._weights.embedding)
        for number, layer in enumerate(self._weights.prepared_layers):
            queries, new = self._compute_heads(layer, x, cos, sin)
            self._cache.write(number, addresses, new)
            if number == len(self._weights.prepared_layers) - 1:  # prefill rows need only keys and values
                if not num_decode_rows:
                    return None
                blocks, num_rows = batch.decode_blocks, max(num_decode_rows, MIN_ROWS)
                x, queries = x[:num_rows], queries[:num_rows]
            x = self._add_mm(x, self._attend(number, queries, new, plans, blocks), layer.out)
            x = self._add_mlp(layer, x)
        normed = self._norm(x, self._weights.norm)
        return compute_logits(self._mm, normed, self._weights.prepared_head)[:num_decode_rows]

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, weight.shape, weight, self.config.rms_norm_eps)

    def _compute_heads(self, layer: LayerWeights, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Return scaled queries [N, H, D], and the keys and values [N, 2 K, D]."""
        config, queries, rotated = self.config, self._num_queries, self._num_rotated
        qkv = self._mm(self._norm(x, layer.input_norm), layer.qkv)
        if layer.qkv_bias is not None:
            qkv += layer.qkv_bias
        heads = qkv.view(-1, rotated + config.num_kv_heads, config.head_dim)
        qk = heads[:, :rotated]
        if layer.q_norm is not None:
            qk = functional.rms_norm(qk, (config.head_dim,), None, config.rms_norm_eps)
        qk = apply_rope(qk * layer.qk_scale, cos, sin)
        return qk[:, :queries], torch.cat((qk[:, queries:], heads[:, rotated:]), 1)

    def _add_mlp(self, layer: LayerWeights, x: Tensor) -> Tensor:
        """Return x plus the output of the MLP or of the experts."""
        normed, mlp = self._norm(x, layer.mlp_norm), layer.mlp
        if isinstance(mlp, MlpWeights):
            gate, up = self._mm(normed, mlp.gate_up).chunk(2, -1)
            return self._add_mm(x, functional.silu(gate).mul_(up), mlp.down)
        assert self.config.experts is not None
        routing = route(self._mm(normed, mlp.router), self.config.experts)
        gate_up = multiply_grouped(routing.gather(normed), mlp.gate_up.transpose(1, 2), routing.ends_X)
        gate, up = gate_up.chunk(2, -1)
        inner = functional.silu(gate).mul_(up)
        return x + routing.combine(multiply_grouped(inner, mlp.down.transpose(1, 2), routing.ends_X))

    def _pad_inputs(self, batch: ForwardBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Return token ids, positions and slots, padded to at least MIN_ROWS rows."""
        missing = MIN_ROWS - len(batch.token_ids)
        if missing <= 0:
            return batch.token_ids, batch.positions, batch.slots
        padding = batch.slots.new_full((missing,), self._cache.padding_page * self._cache.page_tokens)
        zeros = torch.zeros_like(padding)
        token_ids, positions = (torch.cat((part, zeros)) for part in (batch.token_ids, batch.positions))
        return token_ids, positions, torch.cat((batch.slots, padding))

    def _attend(
        self, layer: int, q_NHD: Tensor, new_NJD: Tensor, plans: Sequence[Any], blocks: Sequence[Any]
    ) -> Tensor:
        """Compute attention, [N, H * D]; zeros in padding rows, which no block covers."""
        seen = self._attention(layer, q_NHD, new_NJD, plans, blocks)
        missing = len(q_NHD) - len(seen)
        return functional.pad(seen, (0, 0, 0, missing)) if missing else seen

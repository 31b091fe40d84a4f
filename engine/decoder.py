"""Qwen3 for generation: the same mathematics as engine/qwen3.py, on fused weights and a paged KV cache.

One pass takes tokens of any sequences: those that generate, one of each, and beside them stretches of prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from engine.attention import Attention, Block, Sight
from engine.kv_cache import KvCache
from engine.products import WHOLE, Products
from engine.qwen3 import Layer, Qwen3, rope_tables

MIN_ROWS = 4  # fewer are padded: below it a matrix product sums in another order, and results would differ in last bits


class Pass(NamedTuple):
    """N tokens to be read. The first B are those whose logits are wanted; each row's sequence comes in order of places,
    but rows may stand in any order: all keys and values are written before any are read."""

    token_ids: Tensor  # int64 [N]
    positions: Tensor  # int64 [N]
    slots: Tensor  # int64 [N]: page * page_tokens + place in the page, where keys and values go
    wanted: Sequence[Block]  # of the rows [0, B)
    rest: Sequence[Block]  # of the rows [B, N)


class LayerWeights(NamedTuple):
    """Matrices transposed: [in, out]. H heads, K key/value heads."""

    input_norm: Tensor
    qkv: Tensor  # [E, (H + 2 K) * D]
    qk_norm: Tensor  # [H + K, D]
    out: Tensor
    mlp_norm: Tensor
    gate_up: Tensor  # [E, 2 I]
    down: Tensor


class Decoder:
    def __init__(
        self, model: Qwen3, cache: KvCache, attention: Attention, longest: int, products: Products = WHOLE
    ) -> None:
        """`longest`: tokens of the longest sequence."""
        self.config = model.config
        self._cache, self._attention = cache, attention
        self._product, self._added = products.plain, products.added
        self._num_queries = model.config.num_heads
        self._num_rotated = model.config.num_heads + model.config.num_kv_heads
        embedding = model.model.embed_tokens.weight
        positions = torch.arange(longest, device=embedding.device)
        cos, sin = rope_tables(positions, model.config.head_dim, model.config.rope_theta)
        sin[:, : model.config.head_dim // 2] *= -1  # the sign of `rotate`, so that a roll does the rest
        self._cos, self._sin = (table.to(embedding.dtype).unsqueeze(1) for table in (cos, sin))
        with torch.no_grad():
            self._embedding, self._head, self._norm = _ends(model)
            self._layers = [_fused(layer) for layer in _layers(model)]

    def refresh(self, model: Qwen3) -> None:
        """Take the model's weights as they are now. Copies: the model may be overwritten while this one decodes. In
        place: graphs read them where they were when they were captured."""
        with torch.no_grad():
            for old, new in zip((self._embedding, self._head, self._norm), _ends(model), strict=True):
                old.copy_(new)
            for weights, layer in zip(self._layers, _layers(model), strict=True):
                for old, new in zip(weights, _fused(layer), strict=True):
                    old.copy_(new)

    def read(self, tokens: Pass) -> Tensor | None:
        """Logits float32 [B, V] behind the wanted rows. Keys and values of all rows go into the cache on the way."""
        config, eps, width = self.config, self.config.rms_norm_eps, (self.config.hidden_size,)
        queries, rotated, size = self._num_queries, self._num_rotated, self.config.head_dim
        wanted, blocks = len(tokens.wanted) and tokens.wanted[-1].end, [*tokens.wanted, *tokens.rest]
        token_ids, positions, slots = self._padded(tokens)
        cos, sin = self._cos[positions], self._sin[positions]
        addresses, sights = self._cache.addresses(slots), self._attention.see(positions, blocks)
        x = functional.embedding(token_ids, self._embedding)
        for number, layer in enumerate(self._layers):
            qkv = self._product(functional.rms_norm(x, width, layer.input_norm, eps), layer.qkv)
            heads = qkv.view(-1, rotated + config.num_kv_heads, size)
            qk = functional.rms_norm(heads[:, :rotated], (size,), None, eps) * layer.qk_norm
            qk = torch.addcmul(qk * cos, qk.roll(size // 2, -1), sin)
            new = torch.cat((qk[:, queries:], heads[:, rotated:]), 1)
            self._cache.write(number, addresses, new)
            if number == len(self._layers) - 1:  # nobody asks for more of the other rows than their keys and values
                if not wanted:
                    return None
                blocks, x, qk = tokens.wanted, x[: max(wanted, MIN_ROWS)], qk[: max(wanted, MIN_ROWS)]
            x = self._added(x, self._attend(number, qk[:, :queries], new, sights, blocks), layer.out)
            gate, up = self._product(functional.rms_norm(x, width, layer.mlp_norm, eps), layer.gate_up).chunk(2, -1)
            x = self._added(x, functional.silu(gate).mul_(up), layer.down)
        return self._product(functional.rms_norm(x, width, self._norm, eps), self._head)[:wanted].float()

    def _padded(self, tokens: Pass) -> tuple[Tensor, Tensor, Tensor]:
        """The token ids, positions and slots of at least MIN_ROWS rows."""
        missing = MIN_ROWS - len(tokens.token_ids)
        if missing <= 0:
            return tokens.token_ids, tokens.positions, tokens.slots
        padding = tokens.slots.new_full((missing,), self._cache.padding_page * self._cache.page_tokens)
        zeros = torch.zeros_like(padding)
        token_ids, positions = (torch.cat((part, zeros)) for part in (tokens.token_ids, tokens.positions))
        return token_ids, positions, torch.cat((tokens.slots, padding))

    def _attend(
        self, layer: int, q_NHD: Tensor, new_NJD: Tensor, sights: Sequence[Sight], blocks: Sequence[Block]
    ) -> Tensor:
        """[N, H * D]; zeros in rows that no block covers, which are padding."""
        seen = self._attention(layer, q_NHD, new_NJD, sights, blocks)
        missing = len(q_NHD) - len(seen)
        return functional.pad(seen, (0, 0, 0, missing)) if missing else seen


def _layers(model: Qwen3) -> list[Layer]:
    return [layer for layer in model.model.layers if isinstance(layer, Layer)]


def _ends(model: Qwen3) -> tuple[Tensor, Tensor, Tensor]:
    """Copies of what stands before and behind the layers: embedding [V, E], head [E, V], norm."""
    embedding = model.model.embed_tokens.weight.detach()
    head = embedding if model.lm_head is None else model.lm_head.weight.detach()
    return embedding.clone(), head.t().contiguous(), model.model.norm.weight.detach().clone()


def _fused(layer: Layer) -> LayerWeights:
    """Copies."""
    attention, mlp = layer.self_attn, layer.mlp
    queries = attention.q_proj.weight.shape[0] // attention.head_dim
    keys = attention.k_proj.weight.shape[0] // attention.head_dim
    qkv = torch.cat((attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight))
    scaled = attention.q_norm.weight * attention.head_dim**-0.5  # of attention's scores
    return LayerWeights(
        input_norm=layer.input_layernorm.weight.detach().clone(),
        qkv=qkv.t().contiguous(),
        qk_norm=torch.cat((scaled.expand(queries, -1), attention.k_norm.weight.expand(keys, -1))),
        out=attention.o_proj.weight.detach().t().contiguous(),
        mlp_norm=layer.post_attention_layernorm.weight.detach().clone(),
        gate_up=torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight)).t().contiguous(),
        down=mlp.down_proj.weight.detach().t().contiguous(),
    )

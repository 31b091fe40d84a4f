"""Qwen3 for generation: the same mathematics as engine/qwen3.py, on fused weights and a KV cache.

`fill` reads tokens into the cache, `decode` takes one token of each of the first B rows and returns logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from engine.kv_cache import KvCache
from engine.qwen3 import Layer, Qwen3, rope_tables

FILL_TOKENS = 2048  # padded tokens in one pass of `fill`


class Stretch(NamedTuple):
    """Tokens of one row that go into the cache at [start, start + len(token_ids))."""

    row: int
    start: int
    token_ids: Tensor  # int64


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
    def __init__(self, model: Qwen3, cache: KvCache) -> None:
        self.config = model.config
        self.cache = cache
        self._num_queries = model.config.num_heads
        self._num_rotated = model.config.num_heads + model.config.num_kv_heads
        embedding = model.model.embed_tokens.weight
        positions = torch.arange(cache.page_tokens, device=embedding.device)
        cos, sin = rope_tables(positions, model.config.head_dim, model.config.rope_theta)
        sin[:, : model.config.head_dim // 2] *= -1  # the sign of `rotate`, so that a roll does the rest
        self._cos, self._sin = (table.to(embedding.dtype).unsqueeze(1) for table in (cos, sin))
        self._all_rows = torch.arange(cache.rows, device=embedding.device)
        self.refresh(model)

    def refresh(self, model: Qwen3) -> None:
        """Take the model's weights as they are now. Copies: the model may be overwritten while this one decodes."""
        with torch.no_grad():
            head = model.model.embed_tokens.weight if model.lm_head is None else model.lm_head.weight
            self._embedding = model.model.embed_tokens.weight.detach().clone()
            self._head = head.detach().t().contiguous()
            self._norm = model.model.norm.weight.detach().clone()
            self._layers = [_fused(layer) for layer in model.model.layers if isinstance(layer, Layer)]

    def decode(self, token_ids_B: Tensor, positions_B: Tensor, longest: int) -> Tensor:
        """Logits float32 [B, V] behind the first B rows' tokens, of which none stands beyond position longest - 1."""
        self.cache.fit(longest)
        batch, cache = token_ids_B.shape[0], self.cache
        groups = cache.heads, self._num_queries // cache.heads
        hidden_BW = positions_B[:, None] < self._all_positions(cache.width)
        mask_BKGW = torch.zeros((batch, *groups, cache.width), dtype=self._cos.dtype, device=positions_B.device)
        mask = mask_BKGW.masked_fill_(hidden_BW[:, None, None], float("-inf")).view(-1, groups[1], cache.width)

        def attend(layer: int, q_BHD: Tensor) -> Tensor:
            """Every key/value head serves its group of queries: a batched product over a view of the cache."""
            keys, values = cache.keys[layer][: batch * cache.heads], cache.values[layer][: batch * cache.heads]
            queries = q_BHD.reshape(-1, groups[1], q_BHD.shape[-1])
            scores = torch.baddbmm(mask, queries, keys.transpose(1, 2), alpha=queries.shape[-1] ** -0.5)
            return torch.bmm(scores.softmax(-1), values).view(batch, -1)

        hidden = self._run(token_ids_B, positions_B, self._all_rows[:batch], attend)
        return (hidden @ self._head).float()

    def fill(self, stretches: Sequence[Stretch]) -> None:
        """Read the stretches into the cache, each in order, in passes of at most about FILL_TOKENS padded tokens."""
        pieces = [
            Stretch(row, start + offset, token_ids[offset : offset + FILL_TOKENS])
            for row, start, token_ids in stretches
            for offset in range(0, len(token_ids), FILL_TOKENS)
        ]
        # A row's full pieces come first and in order: the sort is stable, and only its last is shorter.
        pieces.sort(key=lambda piece: -len(piece.token_ids))
        first = 0
        while first < len(pieces):
            count = 1 if len(pieces[first].token_ids) == FILL_TOKENS else FILL_TOKENS // len(pieces[first].token_ids)
            self._fill_pass(pieces[first : first + count])
            first += count

    def _fill_pass(self, pieces: Sequence[Stretch]) -> None:
        """N tokens without padding through the matrices; R rows, padded to the longest, through attention."""
        self.cache.fit(max(piece.start + len(piece.token_ids) for piece in pieces))
        device = self._all_rows.device
        lengths = [len(piece.token_ids) for piece in pieces]
        starts_R = torch.tensor([piece.start for piece in pieces], device=device)
        piece_N = torch.repeat_interleave(torch.tensor(lengths, device=device))
        offset_N = torch.cat([self._all_positions(length) for length in lengths])
        positions_N = starts_R[piece_N] + offset_N
        rows_R = torch.tensor([piece.row for piece in pieces], device=device)
        seen = max(piece.start + length for piece, length in zip(pieces, lengths, strict=True))
        positions_RS = starts_R[:, None] + self._all_positions(max(lengths))
        visible_R1SL = (positions_RS[..., None] >= self._all_positions(seen))[:, None]

        def attend(layer: int, q_NHD: Tensor) -> Tensor:
            q_RSHD = q_NHD.new_zeros((len(pieces), max(lengths), *q_NHD.shape[1:]))
            q_RSHD[piece_N, offset_N] = q_NHD
            keys, values = self.cache.gather(layer, rows_R, seen)
            out_RHSD = functional.scaled_dot_product_attention(
                q_RSHD.transpose(1, 2), keys, values, attn_mask=visible_R1SL, enable_gqa=True
            )
            return out_RHSD.transpose(1, 2)[piece_N, offset_N].flatten(1)

        token_ids_N = torch.cat([piece.token_ids for piece in pieces])
        self._run(token_ids_N, positions_N, rows_R[piece_N], attend, cache_only=True)

    def _run(
        self,
        token_ids_N: Tensor,
        positions_N: Tensor,
        rows_N: Tensor,
        attend: Callable[[int, Tensor], Tensor],
        cache_only: bool = False,
    ) -> Tensor:
        """Hidden states [N, E] behind the last norm; keys and values go into the cache on the way.

        With `cache_only` it stops at the last layer's keys and values, and what it returns means nothing.
        """
        config, eps, width = self.config, self.config.rms_norm_eps, (self.config.hidden_size,)
        queries, rotated, size = self._num_queries, self._num_rotated, self.config.head_dim
        cos, sin = self._cos[positions_N], self._sin[positions_N]
        addresses = self.cache.addresses(rows_N, positions_N)
        x = functional.embedding(token_ids_N, self._embedding)
        for number, layer in enumerate(self._layers):
            qkv = functional.rms_norm(x, width, layer.input_norm, eps) @ layer.qkv
            heads = qkv.view(-1, rotated + config.num_kv_heads, size)
            qk = functional.rms_norm(heads[:, :rotated], (size,), None, eps) * layer.qk_norm
            qk = torch.addcmul(qk * cos, qk.roll(size // 2, -1), sin)
            self.cache.write(number, addresses, qk[:, queries:], heads[:, rotated:])
            if cache_only and number == len(self._layers) - 1:
                break
            x = torch.addmm(x, attend(number, qk[:, :queries]), layer.out)
            gate, up = (functional.rms_norm(x, width, layer.mlp_norm, eps) @ layer.gate_up).chunk(2, -1)
            x = torch.addmm(x, functional.silu(gate).mul_(up), layer.down)
        return functional.rms_norm(x, width, self._norm, eps)

    def _all_positions(self, tokens: int) -> Tensor:
        return torch.arange(tokens, device=self._all_rows.device)


def _fused(layer: Layer) -> LayerWeights:
    attention, mlp = layer.self_attn, layer.mlp
    queries = attention.q_proj.weight.shape[0] // attention.head_dim
    keys = attention.k_proj.weight.shape[0] // attention.head_dim
    qkv = torch.cat((attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight))
    return LayerWeights(
        input_norm=layer.input_layernorm.weight.detach().clone(),
        qkv=qkv.t().contiguous(),
        qk_norm=torch.cat((attention.q_norm.weight.expand(queries, -1), attention.k_norm.weight.expand(keys, -1))),
        out=attention.o_proj.weight.detach().t().contiguous(),
        mlp_norm=layer.post_attention_layernorm.weight.detach().clone(),
        gate_up=torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight)).t().contiguous(),
        down=mlp.down_proj.weight.detach().t().contiguous(),
    )

"""The tensors of one step: token ids, positions, cache slots and attention blocks of the batch and of the prompts."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asterism.engine.inference.batch_state import BatchState, upload
from asterism.engine.inference.decoder import ForwardBatch
from asterism.engine.inference.kernels.attention import CachedAttention
from asterism.engine.inference.kv.kv_cache import KeyValueCache
from asterism.engine.inference.running_batch import RunningBatch
from asterism.engine.inference.sequence import PrefillChunk


class StepInputs:
    def __init__(
        self, cache: KeyValueCache, attention: CachedAttention, state: BatchState, *, keeps_gathered_rows: bool
    ) -> None:
        """`keeps_gathered_rows`: attention keeps gathered rows between steps. It is False with graphs, which write new
        tokens only into the cache."""
        self._cache, self._attention, self._state = cache, attention, state
        self._keeps_gathered_rows = keeps_gathered_rows
        self._decode_blocks: Sequence[Any] = []
        self._blocks_revision = -1  # BatchState.revision of `_decode_blocks`

    def build_batch(self, running: RunningBatch, chunks: list[PrefillChunk]) -> ForwardBatch:
        """Build the batch: the next token of each running sequence, then the tokens of the chunks."""
        token_ids, positions, slots = inputs = self._build_decode_inputs()
        arrays: list[Tensor] = []
        if chunks:
            *prefill, arrays = self._build_prefill_inputs(chunks)
            token_ids, positions, slots = (torch.cat(pair) for pair in zip(inputs, prefill, strict=True))
        if self._blocks_revision != self._state.revision:
            self._decode_blocks, self._blocks_revision = self._build_decode_blocks(running), self._state.revision
        prefill_blocks = self._attention.build_prefill_blocks(len(running.sequences), chunks, arrays)
        return ForwardBatch(token_ids, positions, slots, self._decode_blocks, prefill_blocks)

    def _build_decode_inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return token ids, positions and slots of the running sequences, each int64 [B]."""
        state, active = self._state, self._state.active
        return state.gather_input_ids(active), active.positions, state.compute_slots(active, self._cache.page_tokens)

    def _build_decode_blocks(self, running: RunningBatch) -> Sequence[Any]:
        page_tokens, tables = self._cache.page_tokens, self._state.gather_block_tables(self._state.active)
        lengths: list[int] = ((running.positions // page_tokens + 1) * page_tokens).tolist()
        if not self._keeps_gathered_rows:
            return self._attention.build_row_blocks(0, lengths, tables)
        join_ids = [sequence.join_id for sequence in running.sequences]
        return self._attention.build_decode_blocks(join_ids, lengths, tables)

    def _build_prefill_inputs(self, chunks: list[PrefillChunk]) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """Return token ids, positions and slots, and the arrays of CachedAttention.build_prefill_blocks."""
        ids = np.concatenate([chunk.sequence.token_ids[chunk.start : chunk.end] for chunk in chunks])
        positions = np.concatenate([np.arange(chunk.start, chunk.end) for chunk in chunks])
        slots = np.concatenate([chunk.compute_slots(self._cache.page_tokens) for chunk in chunks])
        arrays = (ids.astype(np.int64), positions, slots, *self._attention.list_prefill_arrays(chunks))
        on_device = upload(arrays, self._cache.memory.device)
        return on_device[0], on_device[1], on_device[2], on_device[3:]

"""The tensors of one step: token ids, positions, cache slots and attention blocks of the batch and of the prompts."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.inference.batch_state import BatchState, upload
from engine.inference.decoder import ForwardBatch
from engine.inference.kernels.attention import MAX_ROWWISE_TOKENS, PagedAttention, RowBlock
from engine.inference.kv.kv_cache import KvCache
from engine.inference.running_batch import RunningBatch
from engine.inference.sequence import PrefillChunk, enumerate_chunks


class StepInputs:
    def __init__(
        self, cache: KvCache, attention: PagedAttention, state: BatchState, *, keeps_gathered_rows: bool
    ) -> None:
        """`keeps_gathered_rows`: attention keeps gathered rows between steps. Graphs write new tokens only into the
        cache, so with graphs kept rows would miss them."""
        self._cache, self._attention, self._state = cache, attention, state
        self._keeps_gathered_rows = keeps_gathered_rows
        self._decode_blocks: list[RowBlock] = []
        self._blocks_revision = -1  # BatchState.revision of `_decode_blocks`

    def build_batch(self, running: RunningBatch, chunks: list[PrefillChunk]) -> ForwardBatch:
        """The next token of each running sequence, then the tokens of the chunks."""
        token_ids, positions, slots = inputs = self._build_decode_inputs()
        tables: list[Tensor] = []
        if chunks:
            *prefill, tables = self._build_prefill_inputs(chunks)
            token_ids, positions, slots = (torch.cat(pair) for pair in zip(inputs, prefill, strict=True))
        if self._blocks_revision != self._state.revision:
            self._decode_blocks, self._blocks_revision = self._build_decode_blocks(running), self._state.revision
        prefill_blocks = self._build_prefill_blocks(len(running.sequences), chunks, tables)
        return ForwardBatch(token_ids, positions, slots, self._decode_blocks, prefill_blocks)

    def _build_decode_inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Token ids, positions and slots of the running sequences, each int64 [B]."""
        state, active = self._state, self._state.active
        return state.gather_input_ids(active), active.positions, state.compute_slots(active, self._cache.page_tokens)

    def _build_decode_blocks(self, running: RunningBatch) -> list[RowBlock]:
        page_tokens, tables = self._cache.page_tokens, self._state.gather_block_tables(self._state.active)
        lengths: list[int] = ((running.positions // page_tokens + 1) * page_tokens).tolist()
        if not self._keeps_gathered_rows:
            return self._attention.build_row_blocks(0, lengths, tables)
        join_ids = [sequence.join_id for sequence in running.sequences]
        return self._attention.build_decode_blocks(join_ids, lengths, tables)

    def _build_prefill_inputs(self, chunks: list[PrefillChunk]) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """Token ids, positions and slots; and the block table of each chunk."""
        ids = np.concatenate([chunk.sequence.token_ids[chunk.start : chunk.end] for chunk in chunks])
        positions = np.concatenate([np.arange(chunk.start, chunk.end) for chunk in chunks])
        slots = np.concatenate([chunk.compute_slots(self._cache.page_tokens) for chunk in chunks])
        tables = [self._build_block_table(chunk) for chunk in chunks]
        arrays = (ids.astype(np.int64), positions, slots, *tables)
        on_device = upload(arrays, self._cache.memory.device)
        return on_device[0], on_device[1], on_device[2], on_device[3:]

    def _build_prefill_blocks(
        self, num_decode_rows: int, chunks: list[PrefillChunk], tables: list[Tensor]
    ) -> list[RowBlock]:
        blocks: list[RowBlock] = []
        for (first, chunk), table in zip(enumerate_chunks(chunks), tables, strict=True):
            count, row = chunk.end - chunk.start, num_decode_rows + first
            if count > MAX_ROWWISE_TOKENS:
                blocks.append(self._attention.build_chunk_block(row, count, table))
            else:
                blocks += self._attention.build_row_blocks(row, [chunk.end] * count, table.expand(count, -1))
        return blocks

    def _build_block_table(self, chunk: PrefillChunk) -> NDArray[np.int64]:
        """The pages of the sequence's first `end` tokens, padded as KvCache.build_page_index expects."""
        table = np.full(self._cache.count_padded_pages(chunk.end), self._cache.padding_page)
        num_pages = self._cache.count_pages(chunk.end)
        table[:num_pages] = chunk.sequence.pages[:num_pages]
        return table

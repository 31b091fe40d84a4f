"""The state of the running sequences as tensors, one row each, so that a step does no Python work per row.

The active rows are those of the current batch, in the order of DenseKvCache.order_by_length
(engine/inference/kv/contiguous_kv.py).
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.contract import MAX_STOP_TOKENS, GenerationRequest
from engine.inference.sampling import SamplingFlags, SamplingTensors
from engine.inference.sequence import MissingPages


class BatchState:
    """R rows of up to T tokens; B of them are active."""

    def __init__(
        self, num_rows: int, max_tokens: int, table_pages: int, padding_page: int, device: torch.device | str
    ) -> None:
        """`table_pages`: the length of a block table; its unused entries are `padding_page`."""

        def make_zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._padding_page = padding_page
        self.revision = 0  # counts changes of the active rows and their pages
        self._token_ids = make_zeros(num_rows, max_tokens)  # prompt and generated tokens
        self._logprobs = make_zeros(num_rows, max_tokens, dtype=torch.float32)  # of generated tokens
        self._tables = torch.full((num_rows, table_pages), padding_page, device=device)
        self._last_position = make_zeros(num_rows)  # of the last token that the request allows
        self._stop_ids = make_zeros(num_rows, MAX_STOP_TOKENS)  # unused: -1
        self._sampling_floats = make_zeros(num_rows, 2, dtype=torch.float32)  # temperature, top_p
        self._sampling_ints = make_zeros(num_rows, 2)  # top_k, seed
        self.activate(np.zeros(0, np.int64), np.zeros(0, np.int64))

    def assign(
        self,
        row: int,
        request: GenerationRequest,
        token_ids: NDArray[np.int32],
        logprobs: NDArray[np.float32],
        pages: Sequence[int],
    ) -> None:
        """`token_ids`: the request's and the generated tokens; `logprobs`: of the generated tokens."""
        self._token_ids[row, : len(token_ids)] = torch.from_numpy(token_ids.astype(np.int64))
        if len(logprobs):
            self._logprobs[row, len(request.token_ids) : len(token_ids)] = torch.from_numpy(logprobs)
        self._tables[row, : len(pages)] = torch.tensor(pages, device=self._tables.device)
        self._tables[row, len(pages) :] = self._padding_page
        self._last_position[row] = len(request.token_ids) + request.max_new_tokens - 1
        stops = [*request.stop_token_ids, *[-1] * MAX_STOP_TOKENS][:MAX_STOP_TOKENS]
        self._stop_ids[row] = torch.tensor(stops)
        self._sampling_floats[row] = torch.tensor((request.temperature, request.top_p))
        self._sampling_ints[row] = torch.tensor((request.top_k, _to_int64(request.seed)))

    def append_pages(self, appended: list[MissingPages]) -> None:
        """The last pages of these sequences are new."""
        for sequence, count in appended:
            for number in range(len(sequence.pages) - count, len(sequence.pages)):
                self._tables[sequence.row, number] = sequence.pages[number]
        self.revision += 1

    def read_back(self, row: int, first: int, end: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Copies of the ids of [0, end) and the logprobs of [first, end)."""
        token_ids = self._token_ids[row, :end].cpu().numpy().astype(np.int32)
        return token_ids, self._logprobs[row, first:end].cpu().numpy().copy()

    # ------------------------------------------------------------ the batch

    def activate(self, rows: NDArray[np.int64], positions: NDArray[np.int64]) -> None:
        """Make these rows the batch, in this order; the next step reads the tokens at `positions`."""
        self.revision += 1
        device = self._last_position.device
        self._rows_B = torch.tensor(rows, dtype=torch.int64, device=device)
        self.position_B = torch.tensor(positions, dtype=torch.int64, device=device)
        self._row_offset_B = self._rows_B * self._token_ids.shape[1]
        self._table_offset_B = self._rows_B * self._tables.shape[1]
        self._last_position_B, self._stop_ids_B = self._last_position[self._rows_B], self._stop_ids[self._rows_B]
        floats_B2, ints_B2 = self._sampling_floats[self._rows_B], self._sampling_ints[self._rows_B]
        temperature_B, top_p_B = floats_B2.unbind(1)
        self.sampling = SamplingTensors(temperature_B, top_p_B, *ints_B2.unbind(1))
        self.sampling_flags = SamplingFlags.from_tensors(self.sampling)

    def gather_block_tables(self) -> Tensor:
        """The batch's block tables, int64 [B, pages]."""
        return self._tables[self._rows_B]

    def gather_input_ids(self) -> Tensor:
        """The token ids that the next step reads, [B]."""
        return self._token_ids.view(-1)[self._row_offset_B + self.position_B]

    def compute_slots(self, page_tokens: int) -> Tensor:
        """The cache slots of the keys and values of these tokens, [B]."""
        pages_B = self._tables.view(-1)[self._table_offset_B + self.position_B // page_tokens]
        return pages_B * page_tokens + self.position_B % page_tokens

    def append_tokens(self, token_ids_B: Tensor, logprobs_B: Tensor) -> list[int]:
        """Write the new tokens and advance; returns the indices of finished sequences in the batch."""
        self.position_B.add_(1)
        addresses_B = self._row_offset_B + self.position_B
        self._token_ids.view(-1)[addresses_B] = token_ids_B
        self._logprobs.view(-1)[addresses_B] = logprobs_B
        stopped_B = (token_ids_B[:, None] == self._stop_ids_B).any(-1)
        return (stopped_B | (self.position_B >= self._last_position_B)).nonzero().flatten().tolist()


def _to_int64(seed: int) -> int:
    """The low 64 bits, as int64."""
    seed &= (1 << 64) - 1
    return seed - (1 << 64) if seed >> 63 else seed

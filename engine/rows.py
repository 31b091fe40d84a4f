"""What a step reads and writes for each running sequence, as tensors, so that a step does no Python work per row.

A row is a running sequence's place here. The active rows are those of the present batch, in attention's order
(engine/kept.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.contract import GenerationRequest
from engine.requests import MAX_STOP_TOKENS
from engine.sampling import Settings, Shortcuts


class Rows:
    """R rows of up to T tokens; B of them are active."""

    def __init__(self, rows: int, tokens: int, pages: int, padding_page: int, device: torch.device | str) -> None:
        """`pages`: the length of a block table; what a sequence does not fill of it is `padding_page`."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._padding_page = padding_page
        self._token_ids = zeros(rows, tokens)  # prompt and generated tokens
        self._logprobs = zeros(rows, tokens, dtype=torch.float32)  # of generated tokens
        self._tables = torch.full((rows, pages), padding_page, device=device)
        self._last = zeros(rows)  # where the last token that the request allows will stand
        self._stops = zeros(rows, MAX_STOP_TOKENS)  # -1 where there is none
        self._heat = zeros(rows, 2, dtype=torch.float32)  # temperature, top_p
        self._draw = zeros(rows, 2)  # top_k, seed
        self.activate([], [])

    def put(
        self,
        row: int,
        request: GenerationRequest,
        token_ids: NDArray[np.int32],
        logprobs: NDArray[np.float32],
        pages: Sequence[int],
    ) -> None:
        """All ids so far, the logprobs of those behind the request's own, and the pages."""
        self._token_ids[row, : len(token_ids)] = torch.from_numpy(token_ids.astype(np.int64))
        if len(logprobs):
            self._logprobs[row, len(request.token_ids) : len(token_ids)] = torch.from_numpy(logprobs)
        self._tables[row, : len(pages)] = torch.tensor(pages, device=self._tables.device)
        self._tables[row, len(pages) :] = self._padding_page
        self._last[row] = len(request.token_ids) + request.max_new_tokens - 1
        stops = [*request.stop_token_ids, *[-1] * MAX_STOP_TOKENS][:MAX_STOP_TOKENS]
        self._stops[row] = torch.tensor(stops)
        self._heat[row] = torch.tensor((request.temperature, request.top_p))
        self._draw[row] = torch.tensor((request.top_k, _signed(request.seed)))

    def append_page(self, row: int, number: int, page: int) -> None:
        """`page` is the sequence's page `number`."""
        self._tables[row, number] = page

    def taken(self, row: int, first: int, end: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Copies of the ids of [0, end) and the logprobs of [first, end)."""
        token_ids = self._token_ids[row, :end].cpu().numpy().astype(np.int32)
        return token_ids, self._logprobs[row, first:end].cpu().numpy().copy()

    # ------------------------------------------------------------ the batch

    def activate(self, rows: Sequence[int], positions: Sequence[int]) -> None:
        """These rows are the batch, in this order; the next step takes in the tokens at `positions`."""
        device = self._last.device
        self._rows_B = torch.tensor(rows, dtype=torch.int64, device=device)
        self.position_B = torch.tensor(positions, dtype=torch.int64, device=device)
        self._starts_B = self._rows_B * self._token_ids.shape[1]
        self._table_starts_B = self._rows_B * self._tables.shape[1]
        self._last_B, self._stops_B = self._last[self._rows_B], self._stops[self._rows_B]
        heat_B2, draw_B2 = self._heat[self._rows_B], self._draw[self._rows_B]
        temperature_B, top_p_B = heat_B2.unbind(1)
        self.settings = Settings(temperature_B, top_p_B, *draw_B2.unbind(1))
        self.shortcuts = Shortcuts.of(self.settings)

    def tables(self) -> Tensor:
        """The batch's block tables, int64 [B, pages]."""
        return self._tables[self._rows_B]

    def inputs(self) -> Tensor:
        """The token ids that the next step takes in, [B]."""
        return self._token_ids.view(-1)[self._starts_B + self.position_B]

    def slots(self, page_tokens: int) -> Tensor:
        """Where their keys and values go, [B]."""
        pages_B = self._tables.view(-1)[self._table_starts_B + self.position_B // page_tokens]
        return pages_B * page_tokens + self.position_B % page_tokens

    def append(self, token_ids_B: Tensor, logprobs_B: Tensor) -> list[int]:
        """Write the new tokens and step forward; which places of the batch are finished now."""
        self.position_B.add_(1)
        addresses_B = self._starts_B + self.position_B
        self._token_ids.view(-1)[addresses_B] = token_ids_B
        self._logprobs.view(-1)[addresses_B] = logprobs_B
        stopped_B = (token_ids_B[:, None] == self._stops_B).any(-1)
        return (stopped_B | (self.position_B >= self._last_B)).nonzero().flatten().tolist()


def _signed(seed: int) -> int:
    """The low 64 bits, as int64 holds them."""
    seed &= (1 << 64) - 1
    return seed - (1 << 64) if seed >> 63 else seed

"""What a decode step reads and writes for each row, as tensors, so that a step does no Python work per row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.contract import GenerationRequest
from engine.requests import MAX_STOP_TOKENS
from engine.sampling import Settings


class Rows:
    """S rows of P tokens, in the order of the KV cache's rows."""

    def __init__(self, rows: int, page_tokens: int, device: torch.device | str) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.token_ids = zeros(rows, page_tokens)  # prompt and generated tokens
        self.logprobs = zeros(rows, page_tokens, dtype=torch.float32)  # of generated tokens
        self.position = zeros(rows)  # of the token that the next step takes in
        self.last = zeros(rows)  # where the last token that the request allows will stand
        self.stops = zeros(rows, MAX_STOP_TOKENS)  # -1 where there is none
        self.temperature = zeros(rows, dtype=torch.float32)
        self.top_p = zeros(rows, dtype=torch.float32)
        self.top_k = zeros(rows)
        self.seed = zeros(rows)
        self._starts = torch.arange(rows, device=device) * page_tokens
        self._all = (
            *(self.token_ids, self.logprobs, self.position, self.last, self.stops),
            *(self.temperature, self.top_p, self.top_k, self.seed),
        )

    def put(self, first: int, requests: Sequence[GenerationRequest]) -> None:
        """The requests' ids and settings into the rows from `first` on."""
        rows = slice(first, first + len(requests))

        def column(values: list[int] | list[float], to: Tensor) -> None:
            to[rows] = torch.tensor(values, dtype=to.dtype, device=to.device)

        for row, request in enumerate(requests, first):
            self.token_ids[row, : len(request.token_ids)] = torch.from_numpy(request.token_ids.astype(np.int64))
        column([len(request.token_ids) - 1 for request in requests], self.position)
        column([len(request.token_ids) + request.max_new_tokens - 1 for request in requests], self.last)
        column([request.temperature for request in requests], self.temperature)
        column([request.top_p for request in requests], self.top_p)
        column([request.top_k for request in requests], self.top_k)
        column([_signed(request.seed) for request in requests], self.seed)
        stops = [[*request.stop_token_ids, *[-1] * MAX_STOP_TOKENS][:MAX_STOP_TOKENS] for request in requests]
        self.stops[rows] = torch.tensor(stops, device=self.stops.device)

    def move(self, to: Sequence[int], source: Sequence[int]) -> None:
        for tensor in self._all:
            tensor[list(to)] = tensor[list(source)]

    def settings(self, batch: int) -> Settings:
        return Settings(self.temperature[:batch], self.top_p[:batch], self.top_k[:batch], self.seed[:batch])

    def inputs(self, batch: int) -> Tensor:
        """The token ids that the next step takes in, [B]."""
        return self.token_ids.view(-1)[self._starts[:batch] + self.position[:batch]]

    def append(self, token_ids_B: Tensor, logprobs_B: Tensor) -> list[int]:
        """Write the new tokens and step forward; the rows that are finished now."""
        batch = len(token_ids_B)
        position_B = self.position[:batch].add_(1)
        addresses_B = self._starts[:batch] + position_B
        self.token_ids.view(-1)[addresses_B] = token_ids_B
        self.logprobs.view(-1)[addresses_B] = logprobs_B
        stopped_B = (token_ids_B[:, None] == self.stops[:batch]).any(-1)
        return (stopped_B | (position_B >= self.last[:batch])).nonzero().flatten().tolist()


def _signed(seed: int) -> int:
    """The low 64 bits, as int64 holds them."""
    seed &= (1 << 64) - 1
    return seed - (1 << 64) if seed >> 63 else seed

"""Decode steps as graphs: what a step without prompts launches is captured once, and launched as one from then on.

A graph is for one number of rows and one number of pages; a batch is padded to the next of both, by rows that read
token 0 into the padding page. Whatever a graph reads and writes stays where it is: the weights (Decoder.refresh), the
cache, attention's buffer, and here its inputs and logits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from engine.attention import Attention
from engine.decoder import MIN_ROWS, Decoder, Pass
from engine.kv_cache import KvCache


class Capture(Protocol):
    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        """What does again on the same memory what `run` does, which is called once or more for it."""
        ...


class DecodeGraphs:
    def __init__(
        self, decoder: Decoder, cache: KvCache, attention: Attention, capture: Capture, most_rows: int
    ) -> None:
        self._decoder, self._cache, self._attention, self._capture = decoder, cache, attention, capture
        rows, device = padded(most_rows, MIN_ROWS), cache.memory.device
        self._token_ids, self._positions, self._slots = torch.zeros((3, rows), dtype=torch.int64, device=device)
        self._tables = torch.full((rows, attention.widest_pages), cache.padding_page, device=device)
        self._logits = torch.zeros((rows, decoder.config.vocab_size), device=device)
        self._replays: dict[tuple[int, int], Callable[[], None]] = {}

    def read(self, token_ids_B: Tensor, positions_B: Tensor, slots_B: Tensor, tables_BN: Tensor, tokens: int) -> Tensor:
        """Logits float32 [B, V], good until the next call. As Decoder.read of B sequences that see `tokens` at most."""
        count, cache = len(token_ids_B), self._cache
        rows = padded(count, MIN_ROWS)
        pages = min(padded(cache.padded_pages(tokens), cache.page_step), self._attention.widest_pages)
        given = ((self._token_ids, token_ids_B, 0), (self._positions, positions_B, 0))
        given += ((self._slots, slots_B, cache.padding_page * cache.page_tokens),)
        for kept, new_B, padding in given:
            kept[:count] = new_B
            kept[count:rows] = padding
        self._tables[:count, :pages] = tables_BN[:, :pages]
        self._tables[count:rows, :pages] = cache.padding_page
        replay = self._replays.get((rows, pages))
        if replay is None:
            replay = self._replays[rows, pages] = self._capture(lambda: self._run(rows, pages))
        replay()
        return self._logits[:count]

    def _run(self, rows: int, pages: int) -> None:
        blocks = self._attention.rows(0, [pages * self._cache.page_tokens] * rows, self._tables[:rows, :pages])
        inputs = (self._token_ids[:rows], self._positions[:rows], self._slots[:rows])
        logits = self._decoder.read(Pass(*inputs, blocks, []))
        assert logits is not None
        self._logits[:rows] = logits


def padded(count: int, least: int) -> int:
    """The next of the sizes for which there are graphs: `least` apart, and from 8 * `least` on four to each doubling."""
    step = max(least, (1 << (count - 1).bit_length()) // 8)
    return -(-count // step) * step


class CudaCapture:
    """On the device that is current when it is made, in the thread that uses it.

    What graphs need on the way lies in one pool, since no two of them run at once. A graph is run once before it is
    captured, on the same stream: libraries make their handles and workspaces then, which they cannot in a capture.
    """

    _one_at_a_time = threading.Lock()  # engines of one process

    def __init__(self) -> None:
        self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        with self._one_at_a_time:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                run()
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                run()
            torch.cuda.current_stream().wait_stream(self._stream)
        return graph.replay

"""Decode steps as graphs: the operations of a step without prompts are captured once, then launched as one.

Each graph has a fixed number of rows and of pages. A batch is padded to both, with rows that read token 0 into the
padding page. All memory of a graph keeps its address: the weights, the cache, attention's buffer, and the inputs and
logits of this class.
"""

import threading
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from engine.inference.decoder import Decoder, ForwardBatch
from engine.inference.kernels.attention import PagedAttention
from engine.inference.kernels.matmul import MIN_ROWS
from engine.inference.kv.kv_cache import KvCache


class GraphCapture(Protocol):
    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        """Returns a function that repeats the operations of `run` on the same memory. May call `run` several times."""
        ...


class DecodeGraphs:
    def __init__(
        self, decoder: Decoder, cache: KvCache, attention: PagedAttention, capture: GraphCapture, max_rows: int
    ) -> None:
        self._decoder, self._cache, self._attention, self._capture = decoder, cache, attention, capture
        rows, device = pad_to_bucket(max_rows, MIN_ROWS), cache.memory.device
        self._token_ids, self._positions, self._slots = torch.zeros((3, rows), dtype=torch.int64, device=device)
        self._tables = torch.full((rows, attention.max_pages), cache.padding_page, device=device)
        self._logits = torch.zeros((rows, decoder.config.vocab_size), device=device)
        self._replays: dict[tuple[int, int], Callable[[], None]] = {}

    def forward(
        self, token_ids_B: Tensor, positions_B: Tensor, slots_B: Tensor, tables_BN: Tensor, tokens: int
    ) -> Tensor:
        """Logits float32 [B, V], valid until the next call, of B sequences of at most `tokens` tokens."""
        count, cache = len(token_ids_B), self._cache
        rows = pad_to_bucket(count, MIN_ROWS)
        pages = min(pad_to_bucket(cache.count_padded_pages(tokens), cache.page_step), self._attention.max_pages)
        inputs = ((self._token_ids, token_ids_B, 0), (self._positions, positions_B, 0))
        inputs += ((self._slots, slots_B, cache.padding_page * cache.page_tokens),)
        for static, new_B, padding in inputs:
            static[:count] = new_B
            static[count:rows] = padding
        self._tables[:count, :pages] = tables_BN[:, :pages]
        self._tables[count:rows, :pages] = cache.padding_page
        replay = self._replays.get((rows, pages))
        if replay is None:
            replay = self._replays[rows, pages] = self._capture(lambda: self._run(rows, pages))
        replay()
        return self._logits[:count]

    def _run(self, rows: int, pages: int) -> None:
        blocks = self._attention.build_row_blocks(
            0, [pages * self._cache.page_tokens] * rows, self._tables[:rows, :pages]
        )
        inputs = (self._token_ids[:rows], self._positions[:rows], self._slots[:rows])
        logits = self._decoder.forward(ForwardBatch(*inputs, blocks, []))
        assert logits is not None
        self._logits[:rows] = logits


def pad_to_bucket(count: int, min_step: int) -> int:
    """The next graph size: multiples of `min_step`; from 8 * `min_step` on, four sizes per doubling."""
    step = max(min_step, (1 << (count - 1).bit_length()) // 8)
    return -(-count // step) * step


class CudaGraphCapture:
    """Captures on the device that is current at construction. Use it in the thread that constructs it.

    Graphs share one memory pool, because no two of them run at the same time. `run` is called once before the capture,
    on the same stream: libraries then create handles and workspaces, which they cannot do during a capture.
    """

    _capture_lock = threading.Lock()  # shared by the engines of one process

    def __init__(self) -> None:
        self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        with self._capture_lock:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                run()
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                run()
            torch.cuda.current_stream().wait_stream(self._stream)
        return graph.replay

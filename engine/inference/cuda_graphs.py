"""Decode steps as CUDA graphs: the operations of a step without prompts are captured once, then launched together.

Each graph has a fixed number of rows and of pages. A batch is padded to both numbers; the keys and values of padding
rows go into the padding page. A graph reads its inputs from BatchState, samples (except with top-p or top-k) and
advances the rows, so that a step launches only the graph. All memory of a graph keeps its address: the weights, the
cache, attention's buffer, the state of the batch, and the results of DecodeGraphs.
"""

import threading
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from asterism.engine.inference.batch_state import BatchState
from asterism.engine.inference.buffer_sizes import MIN_ROWS, pad_to_bucket
from asterism.engine.inference.decoder import Decoder, ForwardBatch
from asterism.engine.inference.kernels.attention import CachedAttention
from asterism.engine.inference.kv.kv_cache import KeyValueCache
from asterism.engine.inference.pending_step import pack_tokens, sample_step
from asterism.engine.inference.sampling import SamplingFlags


class GraphCapture(Protocol):
    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        """Return a function that repeats the operations of `run` on the same memory. May call `run` several times."""
        ...


class DecodeGraphs:
    def __init__(
        self,
        decoder: Decoder,
        cache: KeyValueCache,
        attention: CachedAttention,
        state: BatchState,
        capture: GraphCapture,
    ) -> None:
        """`state` has room for the padding rows that `pad_to_bucket` adds."""
        self._decoder, self._cache, self._attention = decoder, cache, attention
        self._state, self._capture = state, capture
        self._packed = torch.zeros(2 * state.max_active_rows, dtype=torch.int32, device=cache.memory.device)
        self._logits: Tensor | None = None  # allocated before the first step that samples outside of its graph
        self._replays: dict[tuple[int, int, SamplingFlags], Callable[[], None]] = {}

    def run_step(self, longest: int) -> Tensor:
        """Generate a token for each active row, of at most `longest` tokens; return the result of `pack_tokens`.

        The result has columns for padding rows, and is valid until the next call.
        """
        state, cache = self._state, self._cache
        count = len(state.active.rows)
        rows = pad_to_bucket(count, MIN_ROWS)
        pages = self._attention.max_pages
        if not self._attention.reads_pages:
            pages = min(pad_to_bucket(cache.count_padded_pages(longest), cache.page_step), pages)
        flags = state.sampling_flags
        if flags.any_filtered and self._logits is None:
            shape = (state.max_active_rows, self._decoder.config.vocab_size)
            self._logits = torch.zeros(shape, device=cache.memory.device)
        replay = self._replays.get((rows, pages, flags))
        if replay is None:
            progress = state.copy_progress()
            replay = self._replays[rows, pages, flags] = self._capture(lambda: self._run(rows, pages, flags))
            state.restore_progress(progress)
        replay()
        if self._logits is None or not flags.any_filtered:
            return self._packed[: 2 * rows].view(2, rows)
        return pack_tokens(*sample_step(self._logits[:count], state, state.active, flags))

    def _run(self, rows: int, pages: int, flags: SamplingFlags) -> None:
        state, active, page_tokens = self._state, self._state.get_padded_rows(rows), self._cache.page_tokens
        tables = state.gather_block_tables(active, pages)
        blocks = self._attention.build_row_blocks(0, [pages * page_tokens] * rows, tables)
        inputs = (state.gather_input_ids(active), active.positions, state.compute_slots(active, page_tokens))
        logits = self._decoder.forward(ForwardBatch(*inputs, blocks, []))
        assert logits is not None
        if flags.any_filtered:  # a graph that sorted the vocabulary would keep memory for the sort
            assert self._logits is not None
            self._logits[:rows] = logits
        else:
            self._packed[: 2 * rows].view(2, rows).copy_(pack_tokens(*sample_step(logits, state, active, flags)))


class CudaGraphCapture:
    """A GraphCapture on the device that is current at construction. Use it only in the thread that constructs it.

    Graphs share one memory pool, because no two graphs run at the same time. `run` is called once before the capture,
    on the same stream: libraries cannot create their handles and workspaces during a capture.
    """

    _capture_lock = threading.Lock()  # one lock for all engines of a process

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

"""The embedded engine's core: the scheduler, the model and the KV cache, one step at a time. Synchronous, one thread."""

import time
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.contract import Capacity, EngineLoad, GenerationRequest
from engine.inference.batch_state import BatchState
from engine.inference.cuda_graphs import DecodeGraphs, GraphCapture
from engine.inference.decoder import Decoder
from engine.inference.fused_weights import FusedWeights
from engine.inference.kernels.attention import PagedAttention
from engine.inference.kernels.matmul import PLAIN, Matmul
from engine.inference.kv.kv_cache import KvCache
from engine.inference.running_batch import RunningBatch
from engine.inference.sampling import sample
from engine.inference.scheduler import Scheduler
from engine.inference.sequence import PrefillChunk, SequenceOutcome
from engine.inference.step_inputs import StepInputs
from engine.model.causal_lm import CausalLM


class EngineCore:
    """submit, abort, release_cache and install_weights take effect between steps; `step` returns finished requests."""

    def __init__(
        self,
        model: CausalLM,
        capacity: Capacity,
        version: int = 0,
        *,
        prefill_tokens: int = 512,
        max_running: int = 256,
        capture: GraphCapture | None = None,
        matmul: Matmul = PLAIN,
        device: torch.device | None = None,
    ) -> None:
        """Copies the model's weights to `device`, by default the model's.

        `capture` makes graphs of the steps without prompt tokens; without it each operation is launched separately.
        Raises ValueError if the capacity does not hold one sequence of `sequence_tokens`.
        """
        if prefill_tokens < 1 or max_running < 1:
            raise ValueError("prefill_tokens and max_running must be at least 1")
        self.capacity = _round_down_to_pages(capacity)
        self.vocab_size = model.config.vocab_size
        self._busy_s = 0.0
        page_tokens, max_tokens = capacity.page_tokens, capacity.sequence_tokens
        num_pages = self.capacity.kv_tokens // page_tokens
        num_rows = min(max_running, num_pages)
        device = device or next(model.parameters()).device
        self._weights = weights = FusedWeights(model, device)
        with torch.inference_mode():
            self._cache = cache = KvCache(model.config, num_pages, page_tokens, weights.embedding.dtype, device)
            self._attention = attention = PagedAttention(cache, max_tokens)
            self._decoder = Decoder(weights, cache, attention, max_tokens, matmul)
            table_pages = cache.count_padded_pages(max_tokens)
            self._state = BatchState(num_rows, max_tokens, table_pages, cache.padding_page, device)
            self._inputs = StepInputs(cache, attention, self._state, keeps_gathered_rows=capture is None)
            self._graphs: DecodeGraphs | None = None
            if capture is not None:
                self._graphs = DecodeGraphs(self._decoder, cache, attention, capture, num_rows)
        batch = RunningBatch(self._state, num_rows, page_tokens, attention.order_by_length)
        self._scheduler = Scheduler(self.capacity, batch, prefill_tokens, version, self._clear_pages)

    # ------------------------------------------------------------ between steps

    @property
    def version(self) -> int:
        return self._scheduler.version

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    def submit(self, request: GenerationRequest) -> None:
        """See Scheduler.submit."""
        self._scheduler.submit(request)

    @torch.inference_mode()
    def abort(self, sequence_id: int) -> list[SequenceOutcome]:
        return self._scheduler.abort(sequence_id)

    @torch.inference_mode()
    def release_cache(self, sequence_id: int) -> list[SequenceOutcome]:
        return self._scheduler.release_cache(sequence_id)

    @torch.inference_mode()
    def read_generated(self, sequence_id: int, first: int) -> NDArray[np.int32]:
        """See Scheduler.read_generated."""
        return self._scheduler.read_generated(sequence_id, first)

    def get_parameters(self) -> dict[str, Tensor]:
        """The weights by their checkpoint names, to be overwritten before `on_weights_changed`."""
        return self._weights.parameters

    def install_weights(self, version: int, state_dict: Mapping[str, Tensor]) -> None:
        for name, parameter in self.get_parameters().items():
            parameter.copy_(state_dict[name])
        self.on_weights_changed(version)

    @torch.inference_mode()
    def on_weights_changed(self, version: int) -> None:
        """See Scheduler.on_weights_changed."""
        self._weights.update_derived()
        self._scheduler.on_weights_changed(version)

    def get_load(self) -> EngineLoad:
        return self._scheduler.get_load(self._busy_s)

    # ------------------------------------------------------------ one step

    @torch.inference_mode()
    def step(self) -> list[SequenceOutcome]:
        """Prefill as many prompt tokens as one step may, and give every running sequence a token."""
        started = time.perf_counter()
        chunks = self._scheduler.schedule_step()
        logits_BV = self._forward(chunks)
        outcomes = self._sample(logits_BV) if logits_BV is not None else []
        self._busy_s += time.perf_counter() - started
        return outcomes

    def _forward(self, chunks: list[PrefillChunk]) -> Tensor | None:
        """Logits of the running sequences, float32 [B, V]; None without running sequences."""
        running, state = self._scheduler.batch, self._state
        if not running.sequences and not chunks:
            return None
        if self._graphs is not None and not chunks:
            longest = int(running.positions.max()) + 1
            return self._graphs.forward(*self._inputs.build_decode_inputs(), state.gather_block_tables(), longest)
        return self._decoder.forward(self._inputs.build_batch(running, chunks))

    def _sample(self, logits_BV: Tensor) -> list[SequenceOutcome]:
        state = self._state
        tokens_B, logprobs_B = sample(logits_BV, state.position_B + 1, state.sampling, state.sampling_flags)
        return self._scheduler.on_tokens_generated(state.append_tokens(tokens_B, logprobs_B))

    def _clear_pages(self, pages: list[int]) -> None:
        self._cache.zero_pages([*pages, self._cache.padding_page])
        self._attention.clear_dense_cache()


def _round_down_to_pages(capacity: Capacity) -> Capacity:
    """Raises ValueError if no sequence of `sequence_tokens` fits."""
    kv_tokens = capacity.kv_tokens // capacity.page_tokens * capacity.page_tokens
    if not 0 < capacity.sequence_tokens <= kv_tokens:
        raise ValueError(
            f"kv_tokens {capacity.kv_tokens} in pages of {capacity.page_tokens} "
            f"hold no sequence of {capacity.sequence_tokens}"
        )
    return Capacity(kv_tokens, capacity.page_tokens, capacity.sequence_tokens)

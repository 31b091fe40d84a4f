"""The embedded engine's core: the scheduler, the model and the KV cache, one step at a time, in one thread."""

import time
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asterism.engine.contract import Capacity, EngineLoad, GenerationRequest
from asterism.engine.inference.batch_state import BatchState
from asterism.engine.inference.cuda_graphs import DecodeGraphs, GraphCapture
from asterism.engine.inference.decoder import Decoder
from asterism.engine.inference.fused_weights import FusedWeights
from asterism.engine.inference.kernels.attention_kernels import AttentionKernels
from asterism.engine.inference.kernels.block_table_attention import build_attention
from asterism.engine.inference.kernels.matmul import PLAIN, Matmul
from asterism.engine.inference.pending_step import PackedTokens, PendingStep, PendingTokens, sample_step, start_copy
from asterism.engine.inference.running_batch import RunningBatch
from asterism.engine.inference.scheduler import Scheduler, SchedulerActions
from asterism.engine.inference.sequence import PrefillChunk, SequenceOutcome
from asterism.engine.inference.step_inputs import StepInputs
from asterism.engine.model.causal_lm import CausalLM


class EngineCore:
    """An engine in one thread. Calls of submit, abort, release_cache and install_weights come between `step` calls."""

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
        attention_kernels: AttentionKernels | None = None,
        device: torch.device | None = None,
        overlaps_steps: bool = False,
    ) -> None:
        """Copy the model's weights to `device`, by default the model's device.

        With `overlaps_steps`, `step` launches a step and then reads the tokens of the previous step: the device
        computes while the host schedules. The tokens are the same in both modes.

        `capture` captures steps without prompt tokens as graphs; without it each operation is launched separately.
        Raises ValueError if the capacity is too small for a sequence of `sequence_tokens`.
        """
        if prefill_tokens < 1 or max_running < 1:
            raise ValueError("prefill_tokens and max_running must be at least 1")
        self.capacity, self.vocab_size = _round_down_to_pages(capacity), model.config.vocab_size
        self._overlaps_steps, self._busy_s = overlaps_steps, 0.0
        self._pending: PendingStep | None = None
        self._outcomes: list[SequenceOutcome] = []  # outcomes of ended requests, which `step` returns
        device, max_tokens = device or next(model.parameters()).device, capacity.sequence_tokens
        num_rows = min(max_running, self.capacity.kv_tokens // capacity.page_tokens)
        self._weights = weights = FusedWeights(model, device, matmul)
        with torch.inference_mode():
            cache, attention = build_attention(model.config, self.capacity, weights.dtype, device, attention_kernels)
            self._cache, self._attention = cache, attention
            self._decoder = Decoder(weights, cache, attention, max_tokens, matmul)
            self._state = BatchState(num_rows, max_tokens, attention.max_pages, cache.padding_page, device)
            self._inputs = StepInputs(cache, attention, self._state, keeps_gathered_rows=capture is None)
            self._graphs = self._build_graphs(capture)
        batch = RunningBatch(self._state, num_rows, capacity.page_tokens, attention.order_by_length)
        self._scheduler = self._build_scheduler(batch, prefill_tokens, version)

    def _build_scheduler(self, batch: RunningBatch, prefill_tokens: int, version: int) -> Scheduler:
        actions = SchedulerActions(self._clear_pages, self._await_tokens)
        return Scheduler(self.capacity, batch, prefill_tokens, version, actions)

    def _build_graphs(self, capture: GraphCapture | None) -> DecodeGraphs | None:
        if capture is None:
            return None
        return DecodeGraphs(self._decoder, self._cache, self._attention, self._state, capture)

    # ------------------------------------------------------------ between steps

    @property
    def version(self) -> int:
        return self._scheduler.version

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work or self._pending is not None or bool(self._outcomes)

    def submit(self, request: GenerationRequest) -> None:
        """See Scheduler.submit."""
        self._scheduler.submit(request)

    @torch.inference_mode()
    def abort(self, sequence_id: int) -> list[SequenceOutcome]:
        """Abort a request; return its outcome, and outcomes of other requests that have ended."""
        if self._scheduler.is_running(sequence_id):
            self._finish_pending()
        return self._take_outcomes() + self._scheduler.abort(sequence_id)

    @torch.inference_mode()
    def release_cache(self, sequence_id: int) -> list[SequenceOutcome]:
        """Release a sequence's cache; return outcomes as `abort` does."""
        if self._scheduler.is_running(sequence_id):
            self._finish_pending()
        return self._take_outcomes() + self._scheduler.release_cache(sequence_id)

    @torch.inference_mode()
    def finish_step(self) -> list[SequenceOutcome]:
        """Wait for the tokens of the launched step; return the requests that have ended."""
        self._finish_pending()
        return self._take_outcomes()

    @torch.inference_mode()
    def read_generated(self, sequence_id: int, first: int) -> NDArray[np.int32]:
        """See Scheduler.read_generated."""
        return self._scheduler.read_generated(sequence_id, first)

    def get_parameters(self) -> dict[str, Tensor]:
        """Return the weights by checkpoint name. The caller overwrites them, then calls `on_weights_changed`."""
        return self._weights.parameters

    def install_weights(self, version: int, state_dict: Mapping[str, Tensor]) -> None:
        for name, parameter in self.get_parameters().items():
            parameter.copy_(state_dict[name])
        self.on_weights_changed(version)

    @torch.inference_mode()
    def on_weights_changed(self, version: int) -> None:
        """See Scheduler.on_weights_changed."""
        self._finish_pending()
        self._weights.update_derived()
        self._scheduler.on_weights_changed(version)

    def get_load(self) -> EngineLoad:
        return self._scheduler.get_load(self._busy_s)

    # ------------------------------------------------------------ one step

    @torch.inference_mode()
    def step(self) -> list[SequenceOutcome]:
        """Prefill prompt tokens and give each running sequence a token; return the requests that have ended."""
        started = time.perf_counter()
        launched = self._launch(self._scheduler.schedule_step())
        if self._overlaps_steps:
            self._pending, launched = launched, self._pending
        self._read_tokens(launched)
        self._busy_s += time.perf_counter() - started
        return self._take_outcomes()

    def _launch(self, chunks: list[PrefillChunk]) -> PendingStep | None:
        """Launch a step. Return None without running sequences."""
        running = self._scheduler.batch
        if not running.sequences and not chunks:
            return None
        running.arrange()
        tokens = self._compute_tokens(running, chunks)
        return None if tokens is None else PendingStep(running.launch(), tokens)

    def _compute_tokens(self, running: RunningBatch, chunks: list[PrefillChunk]) -> PendingTokens | None:
        """Compute the next tokens of the running sequences. Return None without running sequences."""
        state = self._state
        if self._graphs is not None and not chunks:
            return PackedTokens(self._graphs.run_step(int(running.positions.max()) + 1))
        logits_BV = self._decoder.forward(self._inputs.build_batch(running, chunks))
        if logits_BV is None:
            return None
        return start_copy(*sample_step(logits_BV, state, state.active, state.sampling_flags))

    def _read_tokens(self, step: PendingStep | None) -> None:
        """Wait for the tokens of the step, record them, and collect the outcomes of sequences that end."""
        if step is None:
            return
        launched, (token_ids, logprobs) = step.launched, step.read()
        valid = self._scheduler.batch.mark_known(launched)
        if valid is not None:
            launched, token_ids, logprobs = launched.select(valid), token_ids[valid], logprobs[valid]
        finished = self._state.record_tokens(launched.rows, launched.positions, token_ids, logprobs)
        self._outcomes += self._scheduler.on_tokens_known(launched, finished)

    def _finish_pending(self) -> None:
        """Wait between steps for the launched step, and count this wait as busy time. `step` counts its own waits."""
        started = time.perf_counter()
        self._await_tokens()
        self._busy_s += time.perf_counter() - started

    def _await_tokens(self) -> None:
        step, self._pending = self._pending, None
        self._read_tokens(step)

    def _take_outcomes(self) -> list[SequenceOutcome]:
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def _clear_pages(self, pages: list[int]) -> None:
        self._cache.zero_pages([*pages, self._cache.padding_page])
        self._attention.clear_dense_cache()


def _round_down_to_pages(capacity: Capacity) -> Capacity:
    """Round kv_tokens down to whole pages. Raises ValueError if no sequence of `sequence_tokens` fits."""
    kv_tokens = capacity.kv_tokens // capacity.page_tokens * capacity.page_tokens
    if not 0 < capacity.sequence_tokens <= kv_tokens:
        raise ValueError(
            f"kv_tokens {capacity.kv_tokens} in pages of {capacity.page_tokens} "
            f"have no room for a sequence of {capacity.sequence_tokens} tokens"
        )
    return Capacity(kv_tokens, capacity.page_tokens, capacity.sequence_tokens)

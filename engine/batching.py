"""Continuous batching: which sequence sits in which row, who waits, what a step does. Synchronous, one thread.

The rows [0, running) decode; behind them, in any order, are parked sequences, which keep their keys and values until
they are forgotten, and free rows. One row is one page of the KV cache.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.contract import Capacity, EngineFailure, EngineLoad, Generation, GenerationRequest, RequestRefused
from engine.decoder import Decoder, Stretch
from engine.kv_cache import KvCache
from engine.qwen3 import Qwen3
from engine.rows import Rows
from engine.sampling import Shortcuts, sample

Outcome = tuple[int, Generation | EngineFailure]  # sequence_id, what its generate returns or raises


class _Sequence:
    """One that holds a row. `cached`: how many of its first tokens have keys and values there."""

    def __init__(self, sequence_id: int) -> None:
        self.sequence_id = sequence_id
        self.cached = 0
        self.request: GenerationRequest | None = None  # None while parked
        self.versions: list[tuple[int, int]] = []  # (from this position on, policy version)


class ContinuousBatch:
    """submit, abort, forget and install take effect between steps; `step` returns who finished."""

    def __init__(self, model: Qwen3, capacity: Capacity, version: int = 0) -> None:
        weight = next(model.parameters())
        num_rows = capacity.kv_tokens // capacity.page_tokens
        if num_rows < 1:
            raise ValueError(f"kv_tokens {capacity.kv_tokens} hold no sequence of page_tokens {capacity.page_tokens}")
        self.capacity = Capacity(kv_tokens=num_rows * capacity.page_tokens, page_tokens=capacity.page_tokens)
        self.vocab_size = model.config.vocab_size
        self.version = version
        self._model = model
        with torch.inference_mode():
            self._cache = KvCache(model.config, num_rows, capacity.page_tokens, weight.dtype, weight.device)
            self._rows = Rows(num_rows, capacity.page_tokens, weight.device)
            self._decoder = Decoder(model, self._cache)
        self._held: list[_Sequence | None] = [None] * num_rows  # by row
        self._row_of: dict[int, int] = {}  # by sequence_id
        self._running = 0
        self._waiting: deque[GenerationRequest] = deque()  # for a free row; its bound is the caller's
        self._returning: list[GenerationRequest] = []  # of parked sequences: they need no free row
        self._longest = 0  # tokens that the longest running row will have seen after the next step
        self._shortcuts = Shortcuts(plain=True, greedy=False, filtered=False)
        self._decode_steps = 0
        self._busy_s = 0.0

    # ------------------------------------------------------------ between steps

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything. Requests that wait for a row alone do not count."""
        return self._running > 0 or bool(self._returning) or (bool(self._waiting) and None in self._held)

    def submit(self, request: GenerationRequest) -> None:
        """The request has passed check_request. RequestRefused if its sequence is being generated already."""
        if self._pending(request.sequence_id):
            raise RequestRefused(f"sequence {request.sequence_id} is being generated already")
        if request.sequence_id in self._row_of:
            self._returning.append(request)
        else:
            self._waiting.append(request)

    @torch.inference_mode()
    def abort(self, sequence_id: int) -> list[Outcome]:
        """What the pending request has so far. Nothing pending: nothing."""
        row = self._row_of.get(sequence_id)
        if row is not None and row < self._running:
            return self._retire([row], "abort")
        for queue in (self._waiting, self._returning):
            for request in queue:
                if request.sequence_id == sequence_id:
                    queue.remove(request)
                    return [(sequence_id, _nothing())]
        return []

    @torch.inference_mode()
    def forget(self, sequence_id: int) -> list[Outcome]:
        """Free the sequence's row. A pending request is aborted."""
        outcomes = self.abort(sequence_id)
        row = self._row_of.pop(sequence_id, None)
        if row is not None:
            self._held[row] = None
        if not self._row_of:
            self._cache.shrink()
        return outcomes

    def parameters(self) -> dict[str, Tensor]:
        """The model's weights by their checkpoint names, to be written in place before `weights_changed`."""
        return {name: parameter.detach() for name, parameter in self._model.named_parameters()}

    def install(self, version: int, state_dict: Mapping[str, Tensor]) -> None:
        for name, parameter in self.parameters().items():
            parameter.copy_(state_dict[name])
        self.weights_changed(version)

    @torch.inference_mode()
    def weights_changed(self, version: int) -> None:
        """Tokens bear `version` from now on; what parked sequences have cached is computed anew at their next turn."""
        self._decoder.refresh(self._model)
        self.version = version
        for row, sequence in enumerate(self._held):
            if sequence is None:
                continue
            if row < self._running:
                sequence.versions.append((int(self._rows.position[row]) + 1, version))
            else:
                sequence.cached = 0

    def load(self) -> EngineLoad:
        return EngineLoad(
            running=self._running,
            waiting=len(self._waiting) + len(self._returning),
            used_tokens=len(self._row_of) * self.capacity.page_tokens,
            decode_steps=self._decode_steps,
            busy_s=self._busy_s,
        )

    # ------------------------------------------------------------ one step

    @torch.inference_mode()
    def step(self) -> list[Outcome]:
        """Admit who can be, then one new token for every running sequence; those that finished."""
        started = time.perf_counter()
        self._admit()
        outcomes: list[Outcome] = []
        if self._running:
            finished = self._decode()
            outcomes = self._retire(finished, None) if finished else []
        self._busy_s += time.perf_counter() - started
        return outcomes

    def _decode(self) -> list[int]:
        batch, rows = self._running, self._rows
        logits_BV = self._decoder.decode(rows.inputs(batch), rows.position[:batch], self._longest)
        tokens_B, logprobs_B = sample(logits_BV, rows.position[:batch] + 1, rows.settings(batch), self._shortcuts)
        self._longest += 1
        self._decode_steps += 1
        return rows.append(tokens_B, logprobs_B)

    def _admit(self) -> None:
        """Give rows to those that return and, first come first served, to those that wait; read their prompts."""
        requests, self._returning = self._returning, []
        free = self._held.count(None)
        while self._waiting and free:
            requests.append(self._waiting.popleft())
            free -= 1
        if not requests:
            return
        order = list(range(len(self._held)))
        for target, request in enumerate(requests, self._running):
            row = self._row_of.get(request.sequence_id)
            if row is None:
                row = self._held.index(None)
                self._held[row] = _Sequence(request.sequence_id)
                self._row_of[request.sequence_id] = row
            self._swap(order, row, target)
        self._move(order)
        self._start(requests)

    def _start(self, requests: list[GenerationRequest]) -> None:
        """The rows [running, running + len(requests)) are the requests'. All tokens but the last are read now."""
        first = self._running
        unread = [self._unread(row, request) for row, request in enumerate(requests, first)]
        self._rows.put(first, requests)
        stretches: list[Stretch] = []
        same: dict[bytes, int] = {}  # the row of each prompt: a group's siblings come together, and it is read once
        copies: list[tuple[int, int, int]] = []
        for row, (request, (start, end)) in enumerate(zip(requests, unread, strict=True), first):
            source = same.setdefault(request.token_ids[:end].tobytes(), row) if start == 0 else row
            if source != row:
                copies.append((row, source, end))
            elif start < end:
                stretches.append(Stretch(row, start, self._rows.token_ids[row, start:end]))
        self._decoder.fill(stretches)
        if copies:
            to, sources, ends = zip(*copies, strict=True)
            self._cache.move(to, sources, max(ends))
        self._running += len(requests)
        self._membership_changed()

    def _unread(self, row: int, request: GenerationRequest) -> tuple[int, int]:
        """The stretch of the request's ids that the row's keys and values do not cover yet."""
        sequence, last = self._held[row], len(request.token_ids) - 1
        assert sequence is not None
        sequence.request, sequence.versions = request, [(last + 1, self.version)]
        cached_ids = self._rows.token_ids[row, : min(sequence.cached, last)].cpu().numpy()
        return _common(cached_ids, request.token_ids), last

    def _retire(self, rows: list[int], finish: Literal["abort"] | None) -> list[Outcome]:
        """Park the sequences in these running rows."""
        outcomes = [self._finish(row, finish) for row in rows]
        order = list(range(len(self._held)))
        for row in reversed(rows):
            self._running -= 1
            self._swap(order, row, self._running)
        self._move(order)
        self._membership_changed()
        return outcomes

    def _finish(self, row: int, finish: Literal["abort"] | None) -> Outcome:
        sequence = self._held[row]
        assert sequence is not None and sequence.request is not None
        request, sequence.request = sequence.request, None
        first, position = len(request.token_ids), int(self._rows.position[row])
        token_ids = self._rows.token_ids[row, first : position + 1].cpu().numpy().astype(np.int32)
        logprobs = self._rows.logprobs[row, first : position + 1].cpu().numpy().copy()
        if not np.isfinite(logprobs).all():
            self._cache.clear(row)
            sequence.cached = 0
            return sequence.sequence_id, EngineFailure(f"sequence {sequence.sequence_id}: logits are not finite")
        sequence.cached = position  # the last token has not been taken in
        versions = np.empty(len(token_ids), np.int32)
        for since, version in sequence.versions:
            versions[since - first :] = version
        stopped = len(token_ids) > 0 and int(token_ids[-1]) in request.stop_token_ids
        generation = Generation(token_ids, logprobs, versions, finish or ("stop" if stopped else "length"))
        return sequence.sequence_id, generation

    # ------------------------------------------------------------ rows

    def _pending(self, sequence_id: int) -> bool:
        row = self._row_of.get(sequence_id)
        if row is not None:
            return row < self._running or any(r.sequence_id == sequence_id for r in self._returning)
        return any(request.sequence_id == sequence_id for request in self._waiting)

    def _swap(self, order: list[int], row: int, other: int) -> None:
        """Two rows change places, in the books now and on the device by `_move`."""
        order[row], order[other] = order[other], order[row]
        self._held[row], self._held[other] = self._held[other], self._held[row]
        for place in (row, other):
            sequence = self._held[place]
            if sequence is not None:
                self._row_of[sequence.sequence_id] = place

    def _move(self, order: list[int]) -> None:
        """Row order[i] goes to row i."""
        moved = [(row, sequence) for row, sequence in enumerate(self._held) if sequence and order[row] != row]
        used = max((sequence.cached if row >= self._running else self._longest for row, sequence in moved), default=0)
        if used:
            to = [row for row, _ in moved]
            source = [order[row] for row in to]
            self._rows.move(to, source)
            self._cache.move(to, source, used)

    def _membership_changed(self) -> None:
        if self._running:
            self._longest = int(self._rows.position[: self._running].max()) + 1
            self._shortcuts = Shortcuts.of(self._rows.settings(self._running))


def _common(ids: NDArray[np.int64], others: NDArray[np.int32]) -> int:
    """How many of the first ids are the same; `others` has at least as many."""
    differ = np.flatnonzero(ids != others[: len(ids)])
    return int(differ[0]) if len(differ) else len(ids)


def _nothing() -> Generation:
    empty = np.zeros(0, np.int32)
    return Generation(empty, np.zeros(0, np.float32), empty, "abort")

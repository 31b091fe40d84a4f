"""Continuous batching: who runs, who waits, what a step reads. Synchronous, one thread.

A request waits until its tokens have pages; it reads them, at most `prefill_tokens` of all prompts in a step, first
come first served; then it runs in a row, one token a step, and at its end is parked: what it has cached stays until its
next request, or until others need the pages. A running sequence for which there is no page left is preempted: it gives
up its pages, and goes on from the tokens that it has once there is room.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from engine.attention import ALONE_TOKENS, Attention, Block
from engine.contract import Capacity, EngineLoad, GenerationRequest, RequestRefused
from engine.decoder import Decoder, Pass
from engine.forgotten import Forgotten
from engine.graphs import Capture, DecodeGraphs
from engine.kv_cache import KvCache
from engine.products import WHOLE, Products
from engine.qwen3 import Qwen3
from engine.room import Room
from engine.rows import Rows
from engine.sampling import sample
from engine.sequences import Outcome, Sequence, Stretch, pieces

_NOBODY = np.zeros(0, np.int64)


class ContinuousBatch:
    """submit, abort, forget and install take effect between steps; `step` returns who finished."""

    def __init__(
        self,
        model: Qwen3,
        capacity: Capacity,
        version: int = 0,
        *,
        prefill_tokens: int = 512,
        max_running: int = 256,
        capture: Capture | None = None,
        products: Products = WHOLE,
    ) -> None:
        """`capture` makes graphs of the steps that read no prompt; without it each operation is launched by itself.

        ValueError if the capacity does not hold one sequence of `sequence_tokens`.
        """
        weight = next(model.parameters())
        page_tokens, longest = capacity.page_tokens, capacity.sequence_tokens
        num_pages = capacity.kv_tokens // page_tokens
        if not 0 < longest <= num_pages * page_tokens:
            raise ValueError(f"kv_tokens {capacity.kv_tokens} in pages of {page_tokens} hold no sequence of {longest}")
        if prefill_tokens < 1 or max_running < 1:
            raise ValueError("prefill_tokens and max_running must be at least 1")
        self.capacity = Capacity(num_pages * page_tokens, page_tokens, longest)
        self.vocab_size = model.config.vocab_size
        self.version = version
        self._model = model
        self._prefill_tokens = prefill_tokens
        self._room = Room(num_pages, page_tokens)
        with torch.inference_mode():
            self._cache = KvCache(model.config, num_pages, page_tokens, weight.dtype, weight.device)
            self._attention = Attention(self._cache, longest)
            self._decoder = Decoder(model, self._cache, self._attention, longest, products)
            num_rows, table_pages = min(max_running, num_pages), self._cache.padded_pages(longest)
            self._rows = Rows(num_rows, longest, table_pages, self._cache.padding_page, weight.device)
            self._graphs: DecodeGraphs | None = None
            if capture is not None:
                self._graphs = DecodeGraphs(self._decoder, self._cache, self._attention, capture, num_rows)
        self._sequences: dict[int, Sequence] = {}  # all that are not forgotten
        self._forgotten = Forgotten()
        self._again: deque[Sequence] = deque()  # requests of preempted and of parked sequences: they go first
        self._waiting: deque[Sequence] = deque()  # those of new ones; the bound of both is the caller's
        self._reading: Sequence | None = None  # the one that has pages and not yet read all its tokens
        self._batch: list[Sequence] = []  # that run, in the order of the active rows
        self._free_rows = list(range(num_rows - 1, -1, -1))
        self._positions = _NOBODY  # [B], of the tokens that the next step takes in
        self._page_ends = _NOBODY  # [B], tokens for which each has pages
        self._blocks: list[Block] | None = None  # of the batch; None after a change
        self._arrivals = self._joins = 0
        self._decode_steps = self._generated = self._prefilled = self._recomputed = self._preempted = 0
        self._busy_s = 0.0

    # ------------------------------------------------------------ between steps

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything. Without running sequences there is room for any request."""
        return bool(self._batch or self._reading or self._again or self._waiting)

    def submit(self, request: GenerationRequest) -> None:
        """The request has passed check_request. RequestRefused if its sequence is being generated already."""
        sequence = self._sequences.get(request.sequence_id)
        if sequence is not None and sequence.request is not None:
            raise RequestRefused(f"sequence {request.sequence_id} is being generated already")
        if sequence is None:
            computed = self._forgotten.recall(request.sequence_id, request.token_ids)
            sequence = self._sequences[request.sequence_id] = Sequence(request.sequence_id)
            sequence.token_ids, sequence.computed = request.token_ids, computed
            self._waiting.append(sequence)
        else:
            self._again.append(sequence)
        self._arrivals += 1
        sequence.ask(request, self._arrivals)
        self._room.use(sequence)

    @torch.inference_mode()
    def abort(self, sequence_id: int) -> list[Outcome]:
        """What the pending request has so far. Nothing pending: nothing."""
        sequence = self._sequences.get(sequence_id)
        if sequence is None or sequence.request is None:
            return []
        if sequence.row >= 0:
            return self._retire([self._batch.index(sequence)], "abort")
        if sequence is self._reading:
            self._reading = None
            self._room.park(sequence)
        else:
            (self._again if sequence in self._again else self._waiting).remove(sequence)
        return [sequence.outcome("abort")]

    @torch.inference_mode()
    def forget(self, sequence_id: int) -> list[Outcome]:
        """Drop what the sequence has cached. A pending request is aborted."""
        outcomes = self.abort(sequence_id)
        sequence = self._sequences.pop(sequence_id, None)
        if sequence is not None:
            self._room.drop(sequence)
            self._forgotten.keep(sequence)
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
        """Tokens bear `version` from now on; what parked sequences have cached is computed anew at their next turn.

        Running ones go on with what they have, which nobody new will share; one that reads its tokens begins again.
        """
        self._decoder.refresh(self._model)
        self.version = version
        self._room.forget_parked()
        self._forgotten.clear()
        for sequence, position in zip(self._batch, self._positions.tolist(), strict=True):
            sequence.at(position + 1, version)
            sequence.stale = True
        if self._reading is not None:
            sequence, self._reading = self._reading, None
            self._room.drop(sequence)
            sequence.computed = 0
            self._again.appendleft(sequence)

    def load(self) -> EngineLoad:
        page_tokens, pool = self.capacity.page_tokens, self._room.pool
        return EngineLoad(
            running=len(self._batch) + (self._reading is not None),
            waiting=len(self._again) + len(self._waiting),
            used_tokens=pool.used * page_tokens,
            cached_tokens=pool.cached * page_tokens,
            decode_steps=self._decode_steps,
            generated_tokens=self._generated,
            prefilled_tokens=self._prefilled,
            recomputed_tokens=self._recomputed,
            evicted_tokens=self._room.evicted_pages * page_tokens,
            preempted=self._preempted,
            busy_s=self._busy_s,
        )

    # ------------------------------------------------------------ one step

    @torch.inference_mode()
    def step(self) -> list[Outcome]:
        """Read prompts, as many as one step may, and give every running sequence a token; those that finished."""
        started = time.perf_counter()
        self._grow()
        stretches = self._admit()
        logits_BV = self._read(stretches)
        outcomes = self._sample(logits_BV) if logits_BV is not None else []
        self._busy_s += time.perf_counter() - started
        return outcomes

    def _sample(self, logits_BV: Tensor) -> list[Outcome]:
        rows = self._rows
        finished = rows.append(*sample(logits_BV, rows.position_B + 1, rows.settings, rows.shortcuts))
        self._positions += 1
        self._decode_steps += 1
        self._generated += len(self._batch)
        return self._retire(finished, None) if finished else []

    # ------------------------------------------------------------ who runs

    def _grow(self) -> None:
        """A page for each running sequence whose next token begins one; the oldest request first."""
        needy = [self._batch[place] for place in np.flatnonzero(self._positions >= self._page_ends)]
        for sequence in sorted(needy, key=lambda sequence: sequence.arrival):
            while sequence.row >= 0 and not self._room.grow(sequence):
                self._preempt()
            if sequence.row >= 0:
                self._rows.append_page(sequence.row, len(sequence.pages) - 1, sequence.pages[-1])
                self._page_ends[self._batch.index(sequence)] = len(sequence.pages) * self.capacity.page_tokens
        if needy:
            self._blocks = None

    def _preempt(self) -> None:
        """The request that came last gives up its pages and goes to the front of those that wait."""
        running = [*self._batch] if self._reading is None else [*self._batch, self._reading]
        last = max(running, key=lambda sequence: sequence.arrival)
        if last is self._reading:
            self._reading = None
        else:
            place = self._batch.index(last)
            self._take_back(place)
            self._set_batch(self._staying())
        self._room.drop(last)
        self._again.appendleft(last)
        self._preempted += 1

    def _admit(self) -> list[Stretch]:
        """The prompt tokens of this step. Who has them all then runs."""
        stretches: list[Stretch] = []
        joining: list[Sequence] = []
        left = self._prefill_tokens
        while left > 0 and (sequence := self._next(len(joining))) is not None:
            start, last = sequence.cached, len(sequence.token_ids) - 1
            end = min(last, start + left)
            if start < end:
                stretches.append(Stretch(sequence, start, end))
                self._room.read(stretches[-1])
                self._count(sequence, start, end)
            left -= end - start
            if end == last:
                self._reading = None
                self._count(sequence, last, last + 1)
                joining.append(sequence)
        if joining:
            self._join(joining)
        return stretches

    def _next(self, joining: int) -> Sequence | None:
        """The one that reads its tokens; or the first that waits, if there is a row and room for it."""
        if self._reading is None and len(self._free_rows) > joining:
            queue = self._again or self._waiting
            if queue and self._room.begin(queue[0]):
                self._reading = queue.popleft()
                self._reading.begin()
        return self._reading

    def _count(self, sequence: Sequence, start: int, end: int) -> None:
        """Tokens [start, end) of a prompt are computed in this step."""
        self._prefilled += end - start
        self._recomputed += max(min(end, sequence.computed) - start, 0)
        sequence.computed = max(sequence.computed, end)

    def _join(self, joining: list[Sequence]) -> None:
        for sequence in joining:
            sequence.row = self._free_rows.pop()
            self._joins += 1
            sequence.joined = self._joins
            sequence.at(len(sequence.token_ids), self.version)
            assert sequence.request is not None
            self._rows.put(sequence.row, sequence.request, sequence.token_ids, sequence.logprobs, sequence.pages)
        self._set_batch([*self._batch, *joining])

    def _set_batch(self, sequences: list[Sequence]) -> None:
        """They run from now on, in an order that is good for attention."""
        running = {sequence.row: position for sequence, position in zip(self._batch, self._positions, strict=True)}
        position_of = {sequence.row: len(sequence.token_ids) - 1 for sequence in sequences} | running
        names = [sequence.joined for sequence in sequences]
        positions = [int(position_of[sequence.row]) for sequence in sequences]
        sequences = [sequences[number] for number in self._attention.arranged(names, positions)]
        self._batch = sequences
        self._positions = np.array([position_of[sequence.row] for sequence in sequences], np.int64)
        page_tokens = self.capacity.page_tokens
        self._page_ends = np.array([len(sequence.pages) * page_tokens for sequence in sequences], np.int64)
        self._rows.activate([sequence.row for sequence in sequences], self._positions.tolist())
        self._blocks = None

    def _staying(self) -> list[Sequence]:
        """Those of the batch that have a row."""
        return [sequence for sequence in self._batch if sequence.row >= 0]

    def _take_back(self, place: int) -> None:
        """Its newest tokens from its row, which is free then."""
        sequence, end = self._batch[place], int(self._positions[place]) + 1
        assert sequence.request is not None
        first = len(sequence.request.token_ids)
        sequence.token_ids, sequence.logprobs = self._rows.taken(sequence.row, first, end)
        sequence.cached = end - 1  # the last token has not been taken in
        sequence.computed = max(sequence.computed, end - 1)
        self._free_rows.append(sequence.row)
        sequence.row = -1

    def _retire(self, places: list[int], finish: Literal["abort"] | None) -> list[Outcome]:
        """Park the sequences at these places of the batch."""
        outcomes: list[Outcome] = []
        leaving = [self._batch[place] for place in places]
        for place, sequence in zip(places, leaving, strict=True):
            self._take_back(place)
            outcomes.append(sequence.outcome(finish))
            if np.isfinite(sequence.logprobs).all():
                self._room.park(sequence)
            else:
                self._cache.clear([*self._room.drop(sequence), self._cache.padding_page])
                self._attention.clear()
        self._set_batch(self._staying())
        return outcomes

    # ------------------------------------------------------------ what is read

    def _read(self, stretches: list[Stretch]) -> Tensor | None:
        """Logits of the batch, after its tokens and the stretches are read."""
        rows, page_tokens = self._rows, self.capacity.page_tokens
        if not self._batch and not stretches:
            return None
        inputs = [(rows.inputs(), rows.position_B, rows.slots(page_tokens))]
        if stretches:
            inputs.append(self._prompt_inputs(stretches))
        elif self._graphs is not None:
            return self._graphs.read(*inputs[0], rows.tables(), int(self._positions.max()) + 1)
        token_ids, positions, slots = (
            torch.cat(parts) if stretches else parts[0] for parts in zip(*inputs, strict=True)
        )
        if self._blocks is None:
            self._blocks = self._batch_blocks()
        return self._decoder.read(Pass(token_ids, positions, slots, self._blocks, self._prompt_blocks(stretches)))

    def _batch_blocks(self) -> list[Block]:
        page_tokens, tables = self.capacity.page_tokens, self._rows.tables()
        lengths: list[int] = ((self._positions // page_tokens + 1) * page_tokens).tolist()
        if self._graphs is not None:  # they write new tokens into the cache alone: what was kept would miss them
            return self._attention.rows(0, lengths, tables)
        return self._attention.batch([sequence.joined for sequence in self._batch], lengths, tables)

    def _prompt_inputs(self, stretches: list[Stretch]) -> tuple[Tensor, Tensor, Tensor]:
        """Token ids, positions and slots."""
        ids = np.concatenate([stretch.sequence.token_ids[stretch.start : stretch.end] for stretch in stretches])
        positions = np.concatenate([np.arange(stretch.start, stretch.end) for stretch in stretches])
        slots = np.concatenate([stretch.slots(self.capacity.page_tokens) for stretch in stretches])
        device = self._cache.memory.device
        return tuple(torch.from_numpy(part.astype(np.int64)).to(device) for part in (ids, positions, slots))  # pyright: ignore

    def _prompt_blocks(self, stretches: list[Stretch]) -> list[Block]:
        blocks: list[Block] = []
        for first, stretch in pieces(stretches):
            table = self._table(stretch)
            count, row = stretch.end - stretch.start, len(self._batch) + first
            if count > ALONE_TOKENS:
                blocks.append(self._attention.stretch(row, count, table))
            else:
                blocks += self._attention.rows(row, [stretch.end] * count, table.expand(count, -1))
        return blocks

    def _table(self, stretch: Stretch) -> Tensor:
        """The pages of its first `end` tokens, padded as `gather` wants them."""
        wanted = self._cache.padded_pages(stretch.end)
        pages: list[int] = stretch.sequence.pages[: -(-stretch.end // self.capacity.page_tokens)]
        pages = pages + [self._cache.padding_page] * (wanted - len(pages))
        return torch.tensor(pages, device=self._cache.memory.device)

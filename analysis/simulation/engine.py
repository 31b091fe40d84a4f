"""One simulated engine: continuous batching over a paged KV cache, in virtual time.

It behaves as vLLM's scheduler does by default; SGLang's differs in that it admits nobody whom the running ones' expected
growth leaves no room for, and so preempts less and queues more. A step decodes one token of every running sequence, and
prefills up to a chunk of those that were admitted last. A request is admitted, first come first served, while there are
pages for what it has so far. What a trajectory leaves behind between turns stays cached; where pages run out the caches
used longest ago give up pages, from their ends; then the sequence admitted last is preempted, to be computed again. The
siblings of a group share the whole pages of their prompt.

Between two changes of the batch nothing is looped over: how long the next so many steps take has a closed form.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Protocol

from analysis.simulation.cache import Pages, Sequence
from analysis.simulation.model import Cluster
from analysis.simulation.tokens import spoken_turn
from analysis.simulation.workload import Plan
from bus.messages import EngineLoadReported, ProtocolError, TurnGenerated, TurnRequested

REPORT_S = 0.25


class World(Protocol):
    """What an engine needs around it."""

    now: float
    plans: Mapping[int, Plan]
    computed: dict[int, int]  # tokens of each trajectory that some engine has computed

    def call_at(self, at: float, callback: Callable[[int], None], argument: int) -> None: ...

    def answer(self, turn: TurnGenerated) -> None: ...

    def load(self, report: EngineLoadReported) -> None: ...


class SimulatedEngine:
    """Attributes are counters since the start; `running_s` and `used_page_s` are integrals over time."""

    def __init__(self, name: str, cluster: Cluster, world: World) -> None:
        self.name = name
        self.pages = Pages(cluster.kv_tokens // cluster.page_tokens, cluster.page_tokens)
        self.waiting: deque[Sequence] = deque()
        self.running: OrderedDict[int, Sequence] = OrderedDict()  # they decode; the one that joined last is last
        self.prefilling: OrderedDict[int, Sequence] = OrderedDict()
        self.decode_steps = self.generated_tokens = self.prefilled_tokens = self.recomputed_tokens = 0
        self.preempted = self.overflows = 0
        self.busy_s = self.running_s = self.used_page_s = self.queued_s = self.prefilling_s = 0.0
        self.most_pages = 0
        self._cluster = cluster
        self._cost = cluster.cost
        self._world = world
        self._sequences: dict[int, Sequence] = {}
        self._steps = 0  # ended
        self._settled_at = 0.0  # when the last of them ended, or the engine last stood still
        self._kv_tokens = 0  # of the running ones
        self._residues = [0] * cluster.page_tokens  # running ones by (tokens - steps) modulo a page
        self._ends: list[tuple[int, int, int]] = []  # heap: (step, trajectory, its join)
        self._wake = 0  # the number of the latest wake-up; earlier ones are void
        self._wake_step = 0  # with whose end it comes
        self._chunk_s = 0.0  # duration of the step under way, where it prefills
        self._reports = False

    # ---------------------------------------------------------------- what comes

    def request(self, request: TurnRequested) -> None:
        self._settle()
        plan = self._world.plans[request.trajectory_id]
        sequence = self._sequences.get(request.trajectory_id)
        if sequence is None:
            page = self.pages.page_tokens
            sequence = Sequence(request.trajectory_id, plan.group_id, plan.prompt_tokens, page)
            self._sequences[request.trajectory_id] = sequence
        end = plan.ends[request.turn]
        sequence.lease, sequence.turn = request.lease, request.turn
        sequence.tokens = sequence.began_at = len(request.token_ids) // 4
        sequence.goal = min(end, sequence.tokens + request.max_new_tokens)
        sequence.stops = sequence.goal == end
        sequence.since = self._world.now
        self.waiting.append(sequence)
        if not self._reports:
            self._reports = True
            self._world.call_at(self._world.now + REPORT_S, self._report, 0)
        if not (self.running or self.prefilling):
            self._begin_step()
        else:
            self._look_soon()

    def forget(self, trajectory_id: int, lease: int | None = None) -> None:
        """Its cache, unless a request under a later lease than this one has come."""
        sequence = self._sequences.get(trajectory_id)
        if sequence is None or (lease is not None and sequence.lease > lease):
            return
        self._settle()
        if trajectory_id in self.running or trajectory_id in self.prefilling or sequence in self.waiting:
            raise ProtocolError(f"{self.name} is to forget trajectory {trajectory_id} while it generates")
        self.pages.drop(sequence)
        del self._sequences[trajectory_id]
        if self.waiting:
            self._look_soon()

    # ---------------------------------------------------------------- time

    def settle(self) -> None:
        """Bring the counters and integrals up to now."""
        self._settle()
        if not self._chunk_s and not self.running:
            self._pass(self._world.now - self._settled_at, 0)

    def _settle(self) -> None:
        if self._chunk_s or not self.running:
            return
        elapsed = self._world.now - self._settled_at
        steps = min(self._cost.steps_within(len(self.running), self._kv_tokens, elapsed), self._wake_step - self._steps)
        if steps:
            self._advance(steps, self._cost.steps_s(len(self.running), self._kv_tokens, steps))

    def _advance(self, steps: int, seconds: float) -> None:
        """So many steps have ended."""
        running = len(self.running)
        self.busy_s += seconds
        self._pass(seconds, self._pages_in(steps))
        self.decode_steps += steps
        self.generated_tokens += running * steps
        self._steps += steps
        self._kv_tokens += running * steps
        self._make_room(0)

    def _pass(self, seconds: float, new_pages: int) -> None:
        self.running_s += len(self.running) * seconds
        self.used_page_s += (self.pages.used + new_pages / 2) * seconds
        self.pages.used += new_pages
        self._settled_at += seconds

    def _pages_in(self, steps: int) -> int:
        """New pages that the running sequences take in so many steps."""
        page, residues = self.pages.page_tokens, self._residues
        first = -self._steps % page  # who takes one in the next step; those one below it in the step behind that
        if steps == 1:
            return residues[first]
        cycles, rest = divmod(steps, page)
        return cycles * len(self.running) + sum([residues[first - step] for step in range(rest)])

    def _wake_at(self, step: int) -> None:
        """With the end of that step."""
        seconds = self._cost.steps_s(len(self.running), self._kv_tokens, step - self._steps)
        self._wake += 1
        self._wake_step = step
        self._world.call_at(self._settled_at + seconds, self._awake, self._wake)

    def _look_soon(self) -> None:
        """At the end of the step under way, who may be admitted."""
        if not self._chunk_s and self._wake_step > self._steps + 1:
            self._wake_at(self._steps + 1)

    def _awake(self, wake: int) -> None:
        if wake != self._wake:
            return
        steps = self._wake_step - self._steps
        if steps:
            self._advance(steps, self._world.now - self._settled_at)
        if self._chunk_s:
            self._chunk_s = 0.0
            self._end_chunk()
        self._end_turns()
        self._begin_step()

    # ---------------------------------------------------------------- between two steps

    def _end_turns(self) -> None:
        while self._ends and self._ends[0][0] <= self._steps:
            _, trajectory_id, joined = heapq.heappop(self._ends)
            sequence = self.running.get(trajectory_id)
            if sequence is not None and sequence.joined == joined:
                self._leave(sequence)
                self._answer(sequence)

    def _answer(self, sequence: Sequence) -> None:
        self.pages.park(sequence)
        turn = spoken_turn(
            sequence,
            stops=sequence.stops,
            last=sequence.turn + 1 == len(self._world.plans[sequence.trajectory_id].turns),
        )
        self._world.answer(turn)

    def _leave(self, sequence: Sequence) -> None:
        """The batch: its tokens are its own account again."""
        del self.running[sequence.trajectory_id]
        self._residues[sequence.tokens % self.pages.page_tokens] -= 1
        sequence.tokens += self._steps
        self._kv_tokens -= sequence.tokens
        sequence.pages = self.pages.own(sequence, sequence.tokens)
        self._computed(sequence)

    def _computed(self, sequence: Sequence) -> None:
        """All but the last token, which was drawn and not read yet."""
        sequence.cached_tokens = sequence.tokens - 1
        computed = self._world.computed
        computed[sequence.trajectory_id] = max(computed.get(sequence.trajectory_id, 0), sequence.cached_tokens)

    def _join(self, sequence: Sequence) -> None:
        """Its prompt is computed, and its first token drawn."""
        self.prefilling_s += self._world.now - sequence.since
        sequence.tokens += 1
        self.generated_tokens += 1
        self._computed(sequence)
        if sequence.tokens >= sequence.goal:
            self._answer(sequence)
            return
        sequence.joined += 1
        self.running[sequence.trajectory_id] = sequence
        self._kv_tokens += sequence.tokens
        heapq.heappush(
            self._ends, (self._steps + sequence.goal - sequence.tokens, sequence.trajectory_id, sequence.joined)
        )
        sequence.tokens -= self._steps
        self._residues[sequence.tokens % self.pages.page_tokens] += 1

    def _begin_step(self) -> None:
        if not (self.running or self.prefilling):
            self._pass(self._world.now - self._settled_at, 0)  # it stood still
        preempted = self.preempted
        self._make_room(self._pages_in(1))
        if preempted == self.preempted:
            self._admit()
        self.most_pages = max(self.most_pages, self.pages.used)
        if self.prefilling:
            self._begin_chunk()
        elif self.running:
            self._wake_at(self._steps + self._steps_ahead())
        else:
            self._wake += 1

    def _admit(self) -> None:
        slots = self._cluster.max_running - len(self.running) - len(self.prefilling)
        while self.waiting and slots > 0:
            sequence = self.waiting[0]
            missing = self.pages.missing(sequence, sequence.tokens + 1) + self._pages_in(1)
            alone = not (self.running or self.prefilling)
            if missing > self.pages.room_for(sequence) and not alone:
                return
            self.waiting.popleft()
            slots -= 1
            self._begin_prefill(sequence)

    def _begin_prefill(self, sequence: Sequence) -> None:
        cached = self.pages.prefix(sequence)
        known = self._world.computed.get(sequence.trajectory_id, 0)
        self.recomputed_tokens += max(0, min(known, sequence.tokens) - cached)
        sequence.cached_tokens = cached
        sequence.left = sequence.tokens - cached
        evictions = self.pages.evictions
        self.pages.take(sequence, sequence.tokens + 1)
        self.overflows += self.pages.evictions > evictions
        self.queued_s += self._world.now - sequence.since
        sequence.since = self._world.now
        self.prefilling[sequence.trajectory_id] = sequence

    def _make_room(self, extra: int) -> None:
        """For what is used and so many pages more: caches go, then whoever was admitted last."""
        pages = self.pages
        if pages.used + extra <= pages.capacity:
            return
        self.overflows += 1
        pages.evict(extra)
        while pages.used + extra > pages.capacity:
            self._preempt()
            extra = self._pages_in(1) if extra else 0

    def _preempt(self) -> None:
        if self.prefilling:
            _, sequence = self.prefilling.popitem()
        else:
            sequence = next(reversed(self.running.values()))
            self._leave(sequence)
        self.pages.drop(sequence)
        sequence.cached_tokens = 0
        sequence.since = self._world.now
        self.waiting.appendleft(sequence)
        self.preempted += 1

    def _steps_ahead(self) -> int:
        """Until a turn ends, or pages run out: those of caches count as free."""
        while self._ends[0][1] not in self.running or self.running[self._ends[0][1]].joined != self._ends[0][2]:
            heapq.heappop(self._ends)
        most = self._ends[0][0] - self._steps
        room = self.pages.capacity - self.pages.used + self.pages.reclaimable
        if self._pages_in(most) <= room:
            return most
        least = 1  # room for it was made
        while most - least > 1:
            middle = (least + most) // 2
            if self._pages_in(middle) <= room:
                least = middle
            else:
                most = middle
        return least

    # ---------------------------------------------------------------- prefill

    def _begin_chunk(self) -> None:
        """One step that prefills too, in the order of admission."""
        left, pairs = self._cluster.chunk_tokens, 0.0
        sequences, read = len(self.running), self._kv_tokens
        for sequence in self.prefilling.values():
            tokens = min(left, sequence.left)
            before = sequence.tokens - sequence.left
            pairs += (tokens - 1) * (before + tokens / 2)  # its last one costs what a decoded token does
            sequences += 1
            read += before + tokens
            sequence.left -= tokens
            left -= tokens
            if not left:
                break
        chunk = self._cluster.chunk_tokens - left
        self.prefilled_tokens += chunk
        prefill = chunk - (sequences - len(self.running))
        self._chunk_s = self._cost.step_s(sequences, read, prefill, pairs)
        self._wake += 1
        self._wake_step = self._steps + 1
        self._world.call_at(self._world.now + self._chunk_s, self._awake, self._wake)

    def _end_chunk(self) -> None:
        while self.prefilling:
            sequence = next(iter(self.prefilling.values()))
            if sequence.left:
                return
            del self.prefilling[sequence.trajectory_id]
            self._join(sequence)

    # ---------------------------------------------------------------- what it measures

    def _report(self, _: int) -> None:
        self.settle()
        page = self.pages.page_tokens
        self._world.load(
            EngineLoadReported(
                engine=self.name,
                version=0,
                running=len(self.running),
                waiting=len(self.waiting),
                used_tokens=self.pages.used * page,
                cached_tokens=self.pages.reclaimable * page,
                decode_steps=self.decode_steps,
                generated_tokens=self.generated_tokens,
                prefilled_tokens=self.prefilled_tokens,
                recomputed_tokens=self.recomputed_tokens,
                evicted_tokens=self.pages.evicted_tokens,
                preempted=self.preempted,
                busy_s=self.busy_s,
            )
        )
        self._reports = bool(self.running or self.prefilling or self.waiting)
        if self._reports:
            self._world.call_at(self._world.now + REPORT_S, self._report, 0)

"""A simulated engine under a virtual clock.

The seed determines the generated text. Leases limit its length. Caches behave as in a real engine.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from random import Random

import msgspec
import numpy as np

from asterism.bus.messages import WeightsPublished
from asterism.engine.contract import Capacity, EngineFailure, EngineLoad, Generation, GenerationRequest
from tests.fakes import ANSWER, CALL, END, TOKENIZER

PAGE_TOKENS = 16
TOUCH = CALL.replace("jupyter_code", "touch").replace('"code": "1"', "")  # call of a tool that an environment has
TURN_TEXTS = (CALL, CALL + CALL, ANSWER, "I give up", "<tool_call>{</tool_call>")
TASK_TEXTS = (CALL, TOUCH, TOUCH + TOUCH, ANSWER, "I give up", "<tool_call>{</tool_call>")


class Script:
    """The texts that trajectories generate, whichever engine generates them."""

    def __init__(self, random: Random, texts: Sequence[str]) -> None:
        self._random, self._texts = random, texts
        self._turns: dict[int, tuple[int, list[int]]] = {}  # start and tokens of the current turn, by trajectory

    def left(self, trajectory_id: int, position: int) -> list[int]:
        """Return the remaining tokens of the turn at `position`, or of a new random turn."""
        began_at, turn = self._turns.get(trajectory_id, (-1, []))
        if not began_at <= position < began_at + len(turn):
            began_at, turn = position, [*TOKENIZER.encode(self._random.choice(self._texts), trusted=True), END]
            self._turns[trajectory_id] = began_at, turn
        return turn[position - began_at :]


class FakeEngine:
    """A base of fake engines. It has the methods of asterism.engine.contract.Engine that few fake engines need."""

    def build_load(self, **counts: float) -> EngineLoad:
        """Build a load with these counts, and zero for all other counts."""
        return msgspec.convert({**dict.fromkeys(EngineLoad.__struct_fields__, 0), **counts}, EngineLoad)

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def close(self) -> None: ...


class ScriptedEngine(FakeEngine):
    """Implements asterism.engine.contract.Engine.

    `failure_rate` is the probability of a turn's failure, and the probability of its early abort.
    `evictions` is the probability that a load report counts an evicted token during a request.
    """

    def __init__(
        self,
        random: Random,
        script: Script,
        kv_tokens: int,
        *,
        version: int = -1,
        failure_rate: float = 0.0,
        evictions: float = 0.0,
        oversold: bool = False,
    ) -> None:
        self.version = version
        self.running: dict[int, int] = {}  # reserved pages by sequence, with pages for max_new_tokens
        self.cached: OrderedDict[int, int] = OrderedDict()  # pages by idle sequence
        self._random, self._script = random, script
        self._pages = kv_tokens // PAGE_TOKENS
        self._failure_rate, self._evictions, self._oversold = failure_rate, evictions, oversold
        self._stops: dict[int, asyncio.Event] = {}
        self._generated = self._evicted = 0
        self.released = False

    async def start(self) -> Capacity:
        return Capacity(self._pages * PAGE_TOKENS, PAGE_TOKENS, self._pages * PAGE_TOKENS)

    async def generate(self, request: GenerationRequest) -> Generation:
        sequence = request.sequence_id
        assert sequence not in self.running, "a turn is requested twice"
        assert not self.released, "a turn is requested while the memory is released"
        self._admit(sequence, len(request.token_ids) + request.max_new_tokens)
        stop = self._stops[sequence] = asyncio.Event()
        try:
            async with asyncio.timeout(self._random.expovariate(1)):
                await stop.wait()
        except TimeoutError:
            pass
        finally:
            del self.running[sequence], self._stops[sequence]
        new = self._generate_turn(request, aborted=stop.is_set())
        self.cached[sequence] = self._pages_of(len(request.token_ids) + len(new.token_ids))
        self._generated += len(new.token_ids)
        return new

    def _admit(self, sequence: int, tokens: int) -> None:
        """Reserve the pages of a request, and evict the oldest caches that no longer fit.

        Running requests without caches fit in memory, unless the policy oversells.
        """
        self.cached.pop(sequence, None)
        self.running[sequence] = self._pages_of(tokens)
        assert self._oversold or sum(self.running.values()) <= self._pages, "the leases exceed the engine's pages"
        while self.cached and sum(self.running.values()) + sum(self.cached.values()) > self._pages:
            self._evicted += self.cached.popitem(last=False)[1] * PAGE_TOKENS

    def _generate_turn(self, request: GenerationRequest, *, aborted: bool) -> Generation:
        if self._random.random() < self._failure_rate:
            raise EngineFailure("gone")
        left = self._script.left(request.sequence_id, len(request.token_ids))
        finish, count = "stop", len(left)
        if count > request.max_new_tokens:
            finish, count = "length", request.max_new_tokens
        if aborted or self._random.random() < self._failure_rate:
            finish, count = "abort", self._random.randrange(count)
        return Generation(
            np.array(left[:count], np.int32),
            np.full(count, -1.0, np.float32),
            np.full(count, self.version, np.int32),
            finish,
        )

    def _pages_of(self, tokens: int) -> int:
        return -(-tokens // PAGE_TOKENS)

    def abort(self, sequence_id: int) -> None:
        if sequence_id in self._stops:
            self._stops[sequence_id].set()

    def release_cache(self, sequence_id: int) -> None:
        assert sequence_id not in self.running, "the cache of a running sequence is released"
        self.cached.pop(sequence_id, None)

    async def load_weights(self, weights: WeightsPublished) -> None:
        assert weights.version > self.version or self.released, "the weights are not newer than the loaded weights"
        self.released = False
        await asyncio.sleep(self._random.expovariate(10))
        self.version = weights.version

    def get_load(self) -> EngineLoad:
        self._evicted += bool(self.running) and self._random.random() < self._evictions
        cached = sum(self.cached.values()) * PAGE_TOKENS
        return self.build_load(
            running=len(self.running),
            used_tokens=sum(self.running.values()) * PAGE_TOKENS + cached,
            cached_tokens=cached,
            generated_tokens=self._generated,
            evicted_tokens=self._evicted,
        )

    async def sleep(self) -> None:
        assert not self.running, "the engine sleeps with running sequences"
        await asyncio.sleep(self._random.expovariate(10))
        self.released = True

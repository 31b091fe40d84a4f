"""One SGLang server with too little room under each of the arbiter's policies: what it retracts, and how fast it is.

The arbiter, the trajectories and the generator are a run's own, over the in-process bus; tools and grader are stood in for
as of two engines (benchmarks/_two_engines.py). All groups are asked for at once.

A turn ends where the model draws one of its stop tokens; nobody knows that beforehand, least of all the server. Their
share of the vocabulary makes a turn as long, in the mean, as planned. The temperature is so high that the weights count for
next to nothing: a token follows from its trajectory's seed and its place alone, so every policy comes to the same tokens.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Mapping

import msgspec
from msgspec.structs import replace

from actors.generator import Generator
from analysis.simulation.tokens import ANSWERS, CALLS
from analysis.simulation.workload import Plan, Shape, Workload, draw
from benchmarks._planned import groups
from benchmarks._two_engines import ARBITER, HEAD, Outside, drive
from benchmarks._wrapped_engine import WrappedEngine
from benchmarks.sglang import WeightsAsTheyAre
from bus.in_process import Hub
from configs.schema import Bus
from engine.checkpoint import load_config
from engine.contract import EngineLoad, Generation, GenerationRequest
from engine.requests import MAX_STOP_TOKENS
from engine.sglang.attached import AttachedServer
from engine.sglang.client import SGLangClient
from engine.sglang.engine import SGLangEngine
from engine.sglang.fit import Wanted
from policies.scheduling import PolicyName

ENGINE = "generator-0"
HOT = 1e6  # logits of a random model, divided by this, differ by less than any draw shows
# Most of what a trajectory may generate is one turn's, so that the server runs out of room in the middle of turns.
LONG = Shape(
    "long",
    prompts=6,
    siblings=16,
    median_tokens=600,
    group_sigma=0.45,
    own_sigma=0.4,
    mean_calls=0.1,
    tool_s=0.1,
    time_limit_s=1.0,
    result_tokens=16,
    prompt_tokens=64,
    response_tokens=384,
)


class Outcome(msgspec.Struct, frozen=True):
    """Of one policy, once. Tokens."""

    makespan_s: float
    tokens_per_s: float  # generated
    generated_tokens: int
    decode_batch: float  # sequences that a decode step gives a token
    prefilled_tokens: int
    recomputed_tokens: int  # prefilled though the server had had them of the same trajectory
    evicted_tokens: int  # of those, what it gave up while their trajectory was under way
    retractions: int
    lease_wait_s: float  # mean of trajectories
    digest: str  # of all trajectories' tokens


class StoppingEngine(WrappedEngine):
    """Its turns stop as planned in the mean."""

    def __init__(self, engine: SGLangEngine, plans: Mapping[int, Plan], vocabulary: int) -> None:
        super().__init__(engine)
        self._plans, self._vocabulary = plans, vocabulary
        self._turns = Counter[int]()  # of each trajectory, that have ended
        self.counted: EngineLoad | None = None  # at the end

    async def generate(self, request: GenerationRequest) -> Generation:
        plan, turn = self._plans[request.sequence_id], self._turns[request.sequence_id]
        stops = min(MAX_STOP_TOKENS, max(1, round(self._vocabulary / plan.turns[turn].tokens)))
        found = await super().generate(replace(request, stop_token_ids=tuple(range(stops)), temperature=HOT))
        if found.finish == "stop":
            self._turns[request.sequence_id] += 1
            found.token_ids[-1] = ANSWERS if turn + 1 == len(plan.turns) else CALLS
        return found

    async def close(self) -> None:
        if self.counted is None:
            self.counted = self.load()
        await super().close()


async def measure(served: Wanted, shape: Shape, policy: PolicyName, seed: int) -> Outcome:
    """`served`: a server to attach to, which serves nobody else."""
    work = draw(shape, seed)
    await _forget_all(served.sglang.attach[0])
    vocabulary = load_config(served.model).vocab_size
    engine = StoppingEngine(
        SGLangEngine(
            AttachedServer(served),
            WeightsAsTheyAre(),
            model=served.model,
            sequence_tokens=served.sequence_tokens,
            poll_s=0.05,
        ),
        {plan.trajectory_id: plan for plan in work.plans},
        vocabulary,
    )
    hub, queue_messages = Hub(), Bus().queue_messages
    bus, its = hub.join(HEAD, queue_messages), hub.join(ENGINE, queue_messages)
    generating = asyncio.create_task(Generator(ENGINE, its, engine, ARBITER).run())
    try:
        outside, makespan_s = await drive(bus, work, policy, groups(work, seed, vocabulary), (ENGINE,))
        await generating
    finally:
        generating.cancel()
        await asyncio.gather(generating, return_exceptions=True)
        await its.close()
        await bus.close()
    assert engine.counted is not None
    return _outcome_of(outside, makespan_s, engine.counted)


async def _forget_all(url: str) -> None:
    """What an earlier round left in the server's cache would be found by the next."""
    client = SGLangClient(url)
    try:
        assert await client.flush_cache(), f"{url} has requests under way"
    finally:
        await client.close()


def longest_of(work: Workload) -> int:
    """Tokens of a trajectory."""
    return max(plan.prompt_tokens for plan in work.plans) + work.response_tokens


def _outcome_of(outside: Outside, makespan_s: float, load: EngineLoad) -> Outcome:
    ended = [outside.finished[number] for number in sorted(outside.finished)]
    return Outcome(
        makespan_s=makespan_s,
        tokens_per_s=load.generated_tokens / makespan_s,
        generated_tokens=load.generated_tokens,
        decode_batch=load.generated_tokens / load.decode_steps,
        prefilled_tokens=load.prefilled_tokens,
        recomputed_tokens=load.recomputed_tokens,
        evicted_tokens=load.evicted_tokens,
        retractions=load.preempted,
        lease_wait_s=sum(each.lease_wait_s for each in ended) / len(ended),
        digest=hashlib.blake2b(b"".join(each.token_ids for each in ended), digest_size=8).hexdigest(),
    )

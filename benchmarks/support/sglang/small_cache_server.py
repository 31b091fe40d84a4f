"""Measures one SGLang server with a small cache under each arbiter policy: retractions and speed.

Arbiter, trajectories and generator are those of a run, on the in-process bus. Stubs replace tools
and grader (benchmarks/support/two_engines.py). The harness requests all groups at once.

A turn ends where the model draws one of its stop tokens, at an unpredictable position. The share
of stop tokens in the vocabulary sets the planned mean turn length. The high temperature makes the weights
negligible: a token depends on its trajectory's seed and its position, and on the batch only in the
last bits of a logit.
"""

import asyncio
from collections import Counter
from collections.abc import Mapping

import msgspec
from msgspec.structs import replace

from asterism.actors.generator import Generator
from asterism.analysis.simulation.synthetic_tokens import ANSWER_TOKEN, CALL_TOKEN
from asterism.analysis.simulation.workload import TrajectoryPlan, Workload, WorkloadShape, draw_workload
from asterism.bus.addresses import GENERATOR
from asterism.bus.transport.in_process import Hub
from asterism.configs.schema.algorithm import Sampling
from asterism.configs.schema.machines import BusConfig
from asterism.engine.contract import MAX_STOP_TOKENS, EngineLoad, Generation, GenerationRequest, TokenListener
from asterism.engine.model.hf_checkpoint import load_model_config
from asterism.engine.sglang.client import SGLangClient
from asterism.engine.sglang.server.compatibility import ServerRequirements
from asterism.engine.sglang.server.external_server import ExternalServer
from asterism.engine.sglang.sglang_engine import SGLangEngine
from asterism.policies.arbiter.arbiter import PolicyName
from benchmarks.sglang import FixedWeights
from benchmarks.support.planned_lengths import build_groups
from benchmarks.support.two_engines import ARBITER, HEAD, RolloutHarness, compute_digests, drive

ENGINE = GENERATOR
HOT = 1e6  # temperature that makes the logits of a random model irrelevant
# A single turn can have most of a trajectory's tokens, so the server's cache fills within turns.
LONG = WorkloadShape(
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


class ScarceServerOutcome(msgspec.Struct, frozen=True):
    """The outcome of one round of one policy, in tokens."""

    makespan_s: float
    tokens_per_s: float  # generated tokens per second
    generated_tokens: int
    decode_batch: float  # sequences per decode step
    prefilled_tokens: int
    recomputed_tokens: int  # tokens that were prefilled again for the same trajectory
    evicted_tokens: int  # recomputed tokens that the server evicted before their trajectory's end
    retractions: int
    lease_wait_s: float  # mean seconds that a trajectory waits for its leases
    digests: tuple[str, ...]  # digests of the trajectories' tokens, by number


class StoppingEngine(SGLangEngine):
    """An engine whose turns have the planned mean length."""

    def __init__(self, served: ServerRequirements, plans: Mapping[int, TrajectoryPlan], vocabulary: int) -> None:
        super().__init__(
            ExternalServer(served),
            FixedWeights(),
            model=served.model,
            sequence_tokens=served.sequence_tokens,
            load_poll_s=0.05,
        )
        self._plans, self._vocabulary = plans, vocabulary
        self._completed_turns = Counter[int]()  # number of completed turns of each trajectory id
        self.counted: EngineLoad | None = None  # set by `close`

    async def generate(self, request: GenerationRequest, on_tokens: TokenListener | None = None) -> Generation:
        plan, turn = self._plans[request.sequence_id], self._completed_turns[request.sequence_id]
        stops = min(MAX_STOP_TOKENS, max(1, round(self._vocabulary / plan.turns[turn].tokens)))
        asked = replace(request, stop_token_ids=tuple(range(stops)), sampling=Sampling(temperature=HOT))
        found = await super().generate(asked, on_tokens)
        if found.finish == "stop":
            self._completed_turns[request.sequence_id] += 1
            found.token_ids[-1] = ANSWER_TOKEN if turn + 1 == len(plan.turns) else CALL_TOKEN
        return found

    async def close(self) -> None:
        if self.counted is None:
            self.counted = self.get_load()
        await super().close()


async def measure(
    served: ServerRequirements, shape: WorkloadShape, policy: PolicyName, seed: int
) -> ScarceServerOutcome:
    """Measure one policy on `served`, a server without other clients."""
    work = draw_workload(shape, seed)
    await _flush_cache(served.sglang.external_urls[0])
    vocabulary = load_model_config(served.model).vocab_size
    engine = StoppingEngine(served, {plan.trajectory_id: plan for plan in work.plans}, vocabulary)
    hub, queue_messages = Hub(), BusConfig().queue_messages
    bus, its = hub.join(HEAD, queue_messages), hub.join(ENGINE, queue_messages)
    generating = asyncio.create_task(Generator(ENGINE, its, engine, ARBITER).run())
    try:
        outside, makespan_s = await drive(bus, work, policy, build_groups(work, seed, vocabulary), (ENGINE,))
        await generating
    finally:
        generating.cancel()
        await asyncio.gather(generating, return_exceptions=True)
        await its.close()
        await bus.close()
    assert engine.counted is not None
    return _build_outcome(outside, makespan_s, engine.counted)


async def _flush_cache(url: str) -> None:
    """Flush the server's cache, so that a round has no cache hits from an earlier round."""
    client = SGLangClient(url)
    try:
        assert await client.flush_cache(), f"{url} has requests under way"
    finally:
        await client.close()


def find_longest(work: Workload) -> int:
    """Return the highest number of tokens that a trajectory can have."""
    return max(plan.prompt_tokens for plan in work.plans) + work.response_tokens


def _build_outcome(outside: RolloutHarness, makespan_s: float, load: EngineLoad) -> ScarceServerOutcome:
    ended = [outside.finished[number] for number in sorted(outside.finished)]
    return ScarceServerOutcome(
        makespan_s=makespan_s,
        tokens_per_s=load.generated_tokens / makespan_s,
        generated_tokens=load.generated_tokens,
        decode_batch=load.generated_tokens / load.decode_steps,
        prefilled_tokens=load.prefilled_tokens,
        recomputed_tokens=load.recomputed_tokens,
        evicted_tokens=load.evicted_tokens,
        retractions=load.preempted,
        lease_wait_s=sum(each.lease_wait_s for each in ended) / len(ended),
        digests=compute_digests(ended),
    )

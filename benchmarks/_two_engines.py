"""Two real engines whose caches hold a third of what a step's rollouts demand, under each of the arbiter's policies.

The arbiter and the trajectories are a run's own, in a decider loop in this process; each engine is a generator's, in a
process of its own, reached over ZeroMQ; tools and grader are stood in for by latencies that were drawn beforehand. All
groups are asked for at once. A policy's time is from then on to the end of the last trajectory. Every policy must come to
the same tokens, for a token depends on its trajectory's seed and its position alone: this is checked.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from actors.clock import steady_clock
from actors.decider_loop import DeciderLoop
from analysis.simulation.tokens import LengthTokenizer
from analysis.simulation.workload import Shape, Workload, draw
from benchmarks._engine_process import Setup
from benchmarks._planned import Counts, groups
from bus.messages import (
    AnswerGraded,
    AnswerSubmitted,
    AnyMessage,
    CodeFinished,
    CodeOk,
    CodeRequested,
    EngineJoined,
    ExecutorJoined,
    LeaseGranted,
    Output,
    Shutdown,
    StartGroup,
    TrajectoryFinished,
)
from bus.transport import Bus
from bus.zeromq import zmq_bus
from configs.schema import Bus as BusConfig
from engine.contract import Capacity
from policies.arbiter import Arbiter
from policies.decider import Send
from policies.rollout import Rollout
from policies.scheduling import PolicyName
from policies.trajectory import Rules

ENGINES = ("generator-0", "generator-1")
PAGE_TOKENS = 16
SHARE = 1 / 3  # of the demand is what the caches hold
HEAD, ARBITER, ROLLOUT, BUFFER, EXECUTOR, LAUNCHER = (
    *("head", "head/arbiter", "head/rollout", "head/buffer", "head/executor", "head/launcher"),
)
LONGEST_S = 300.0  # a policy that takes longer is taken for one that waits for ever


class Stuck(Exception):
    """Trajectories that never end."""


class Outcome(msgspec.Struct, frozen=True):
    """Of one policy, once. Tokens; summed over the engines."""

    makespan_s: float
    tokens_per_s: float  # generated
    generated_tokens: int
    prefilled_tokens: int
    recomputed_tokens: int  # prefilled though an engine had had them of the same trajectory, this one or another
    recomputed_share: float  # of the generated ones
    evicted_tokens: int
    preempted: int
    migrations: int
    decode_batch: float  # sequences that a decode step gives a token
    busy_share: float  # of the makespan, mean over the engines
    cpu_s: float  # of the engines' processes: less than the makespan each where others use the machine
    lease_wait_s: float  # mean of trajectories
    digest: str  # of all trajectories' tokens


class Outside:
    """What stands around the deciders: tools and grader as drawn, the buffer, and the count of who came and moved."""

    quiet = False  # as actors.decider_loop.Observer has it

    def __init__(self, work: Workload, engines: Sequence[str]) -> None:
        self._engines = set(engines)
        self._plans = {plan.trajectory_id: plan for plan in work.plans}
        self._grading_s = work.grading_s
        self._placed: dict[int, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.finished: dict[int, TrajectoryFinished] = {}
        self.migrations = 0
        self.joined: set[str] = set()
        self.all_joined, self.all_ended = asyncio.Event(), asyncio.Event()
        self.bus: Bus | None = None

    def saw(self, now: float, event: AnyMessage, effects: Sequence[Send]) -> None:
        """As actors.decider_loop.Observer."""
        if isinstance(event, EngineJoined):
            self.joined.add(event.engine)
            if self.joined == self._engines:
                self.all_joined.set()
        for effect in effects:
            if isinstance(granted := effect.message, LeaseGranted):
                before = self._placed.get(granted.trajectory_id, granted.engine)
                self.migrations += before != granted.engine
                self._placed[granted.trajectory_id] = granted.engine

    async def execute(self, message: AnyMessage) -> None:
        match message:
            case CodeRequested(trajectory_id=trajectory_id, call=call):
                turn = self._plans[trajectory_id].turns[call]
                outcome = CodeOk(Output(str(turn.result_tokens)))
                self._later(turn.tool_s, CodeFinished(trajectory_id, call, outcome, turn.tool_s, EXECUTOR))
            case AnswerSubmitted(trajectory_id=trajectory_id):
                self._later(self._grading_s, AnswerGraded(trajectory_id, True, self._grading_s, EXECUTOR))
            case _:
                pass

    def _later(self, seconds: float, message: AnyMessage) -> None:
        async def answer() -> None:
            await asyncio.sleep(seconds)
            assert self.bus is not None
            await self.bus.send(ROLLOUT, message)

        task = asyncio.create_task(answer())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def collect(self, message: AnyMessage) -> None:
        assert isinstance(message, TrajectoryFinished), message
        self.finished[message.trajectory_id] = message
        if len(self.finished) == len(self._plans):
            self.all_ended.set()

    async def ignore(self, message: AnyMessage) -> None: ...


def rules(work: Workload) -> Rules:
    return Rules(
        tools=("jupyter_code",),
        response_tokens=work.response_tokens,
        max_turns=work.max_turns,
        max_calls_per_turn=1,
        result_characters=64,
        top_p=1.0,
        top_k=0,
        stop_token_ids=(),
        arbiter=ARBITER,
        buffer=BUFFER,
        launcher=LAUNCHER,
    )


def capacity_of(work: Workload) -> Capacity:
    """Of one engine."""
    longest = max(plan.prompt_tokens for plan in work.plans) + work.response_tokens
    kv_tokens = max(int(work.demand_tokens * SHARE / len(ENGINES)), longest + PAGE_TOKENS)
    return Capacity(kv_tokens // PAGE_TOKENS * PAGE_TOKENS, PAGE_TOKENS, longest)


async def drive(
    bus: Bus, work: Workload, policy: PolicyName, asked: Sequence[StartGroup], engines: Sequence[str] = ENGINES
) -> tuple[Outside, float]:
    """One step's rollouts: the groups of `asked`, once all engines have joined. Who finished, and the makespan in seconds.
    Raises Stuck."""
    outside = Outside(work, engines)
    outside.bus = bus
    deciders = {
        "arbiter": Arbiter(policy, work.response_tokens, holder=ROLLOUT, address=ARBITER, observer=LAUNCHER),
        "rollout": Rollout(rules(work), LengthTokenizer()),
    }
    services = {"buffer": outside.collect, "executor": outside.execute, "launcher": outside.ignore}
    loop = DeciderLoop(bus, None, deciders, services, steady_clock(), outside)
    deciding = asyncio.create_task(loop.run())
    try:
        async with asyncio.timeout(LONGEST_S):
            await outside.all_joined.wait()
            await bus.send(ROLLOUT, ExecutorJoined(EXECUTOR, 1 << 20))
            began = time.perf_counter()
            for group in asked:
                await bus.send(ROLLOUT, group)
            await outside.all_ended.wait()
            makespan_s = time.perf_counter() - began
    except TimeoutError:
        raise Stuck(f"{policy}: {len(work.plans) - len(outside.finished)} trajectories have not ended") from None
    finally:
        for name in (*outside.joined, HEAD):
            await bus.send(name, Shutdown())
        await deciding
    return outside, makespan_s


async def _started(setup: Setup) -> asyncio.subprocess.Process:
    command = [sys.executable, "-m", "benchmarks._engine_process", msgspec.json.encode(setup).decode()]
    return await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)


async def measure(checkpoint: Path, shape: Shape, policy: PolicyName, seed: int) -> Outcome:
    work = draw(shape, seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        setups = [
            Setup(engine, ARBITER, str(folder), str(checkpoint), capacity_of(work), 1, shape, seed)
            for engine in ENGINES
        ]
        processes = [await _started(setup) for setup in setups]
        bus = zmq_bus(HEAD, folder, BusConfig().queue_messages)
        try:
            outside, makespan_s = await drive(bus, work, policy, groups(work, seed))
            lines = [(await process.communicate())[0] for process in processes]
        finally:
            for process in processes:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
            await bus.close()
    return outcome_of(outside, makespan_s, [msgspec.json.decode(line, type=Counts) for line in lines])


def outcome_of(outside: Outside, makespan_s: float, counts: Sequence[Counts]) -> Outcome:
    loads = [each.load for each in counts]
    generated, prefilled = (
        sum(getattr(load, f"{kind}_tokens") for load in loads) for kind in ("generated", "prefilled")
    )
    recomputed = prefilled - sum(each.first_prefills for each in counts)
    ended = [outside.finished[number] for number in sorted(outside.finished)]
    return Outcome(
        makespan_s=makespan_s,
        tokens_per_s=generated / makespan_s,
        generated_tokens=generated,
        prefilled_tokens=prefilled,
        recomputed_tokens=recomputed,
        recomputed_share=recomputed / generated,
        evicted_tokens=sum(load.evicted_tokens for load in loads),
        preempted=sum(load.preempted for load in loads),
        migrations=outside.migrations,
        decode_batch=generated / sum(load.decode_steps for load in loads),
        busy_share=sum(load.busy_s for load in loads) / len(loads) / makespan_s,
        cpu_s=sum(each.cpu_s for each in counts),
        lease_wait_s=sum(each.lease_wait_s for each in ended) / len(ended),
        digest=hashlib.blake2b(b"".join(each.token_ids for each in ended), digest_size=8).hexdigest(),
    )


async def compare(
    checkpoint: Path, shape: Shape, seed: int, policies: Sequence[PolicyName], rounds: int
) -> dict[str, object]:
    """The policies in turns, so that whatever else the machine does meets all; of each the round with the median time."""
    work = draw(shape, seed)
    capacity = capacity_of(work)
    print(
        f"{len(work.plans)} trajectories, {work.generated_tokens} tokens to generate, {work.demand_tokens} held at once "
        f"at their ends; {len(ENGINES)} engines with {capacity.kv_tokens} tokens each",
        flush=True,
    )
    outcomes: dict[PolicyName, list[Outcome]] = {policy: [] for policy in policies}
    for _ in range(rounds):
        for policy in policies:
            outcomes[policy].append(await measure(checkpoint, shape, policy, seed))
            print(_line(policy, outcomes[policy][-1]), flush=True)
    digests = {outcome.digest for each in outcomes.values() for outcome in each}
    assert len(digests) == 1, f"not all came to the same tokens: {digests}"
    typical = {policy: _typical(each) for policy, each in outcomes.items()}
    figures: dict[str, object] = {"two_engines": {policy: _figures(each) for policy, each in typical.items()}}
    if {"kv_lookahead", "least_requests"} <= typical.keys():
        ours, theirs = typical["kv_lookahead"], typical["least_requests"]
        figures["kv_lookahead_over_least_requests"] = round(ours.tokens_per_s / theirs.tokens_per_s, 3)
    return figures


def _typical(outcomes: Sequence[Outcome]) -> Outcome:
    """The one with the median makespan; of two the faster."""
    return sorted(outcomes, key=lambda outcome: outcome.makespan_s)[(len(outcomes) - 1) // 2]


def _figures(outcome: Outcome) -> dict[str, float | int]:
    fields = msgspec.structs.asdict(outcome)
    del fields["digest"]
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in fields.items()}


def _line(policy: PolicyName, outcome: Outcome) -> str:
    return (
        f"{policy:14} {outcome.makespan_s:6.2f} s {outcome.tokens_per_s:7.0f} tokens/s, "
        f"{outcome.recomputed_share:6.1%} recomputed, {outcome.evicted_tokens:6} tokens evicted, "
        f"{outcome.preempted:4} preempted, {outcome.migrations:4} moves, "
        f"batch {outcome.decode_batch:5.1f}, busy {outcome.busy_share:4.0%}, CPU {outcome.cpu_s:5.1f} s, lease wait {outcome.lease_wait_s:5.2f} s"
    )

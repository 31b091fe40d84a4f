"""Runs two real engines with small caches under each arbiter policy.

The caches hold a third of the demand of a step's rollouts. Arbiter and trajectories are those of a
run, in a decider loop in this process. Each engine has a generator in a separate process, over
ZeroMQ. Predrawn latencies replace tools and grader. The harness requests all groups at once. The
time of a policy is from that request to the end of the last trajectory. A token depends on the seed of
its trajectory and on its position, and on the batch only in the last bits of a logit. The benchmark
therefore reports the share of trajectories that differ between policies.
"""

import asyncio
import hashlib
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from asterism.actors.runtime.decider_loop import DeciderLoop, make_steady_clock
from asterism.analysis.simulation.synthetic_tokens import LengthTokenizer
from asterism.analysis.simulation.workload import Workload, WorkloadShape, draw_workload
from asterism.bus.bus import Bus
from asterism.bus.messages import (
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
from asterism.bus.transport.zeromq import open_zmq_bus
from asterism.configs.schema.dialogue import DialogueConfig
from asterism.configs.schema.machines import BusConfig as BusConfig
from asterism.engine.contract import Capacity
from asterism.policies.arbiter.arbiter import Arbiter, PolicyName
from asterism.policies.decider import Send
from asterism.policies.dialogue.chat_format import build_dialogue_format
from asterism.policies.dialogue.dialogue_renderer import ChatMLRenderer
from asterism.policies.rollout.rollout import Rollout
from asterism.policies.rollout.trajectory import Rules
from asterism.tasks import DEFAULT_TASK
from benchmarks.support.generator_process import EngineSetup
from benchmarks.support.planned_lengths import EngineCounts, build_groups

ENGINES = ("generator-0", "generator-1")
PAGE_TOKENS = 16
SHARE = 1 / 3  # share of the demand for KV cache that both engines together can hold
HEAD, ARBITER, ROLLOUT, BUFFER, EXECUTOR, LAUNCHER = (
    *("head", "head/arbiter", "head/rollout", "head/buffer", "head/executor", "head/launcher"),
)
LONGEST_S = 300.0  # time limit of a round; unfinished trajectories are then stuck


class StuckTrajectories(Exception):
    """Some trajectories did not end within the time limit."""


class TwoEngineOutcome(msgspec.Struct, frozen=True):
    """The outcome of one round of one policy, in tokens summed over the engines."""

    makespan_s: float
    tokens_per_s: float  # generated tokens per second
    generated_tokens: int
    prefilled_tokens: int
    recomputed_tokens: int  # tokens that were prefilled again for the same trajectory, on any engine
    recomputed_share: float  # recomputed tokens over generated tokens
    evicted_tokens: int
    preempted: int
    migrations: int
    decode_batch: float  # sequences per decode step
    busy_share: float  # share of the makespan in which an engine computes; mean over the engines
    cpu_s: float  # CPU seconds of the engines' processes; below the makespan on a shared machine
    lease_wait_s: float  # mean seconds that a trajectory waits for its leases
    digests: tuple[str, ...]  # digests of the trajectories' tokens, by number


class RolloutHarness:
    """The environment of the deciders: tools and grader with predrawn latencies, the buffer, and counters."""

    quiet = False  # a field of asterism.actors.runtime.decider_loop.Observer

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

    def on_decision(self, now: float, event: AnyMessage, effects: Sequence[Send]) -> None:
        """Implement asterism.actors.runtime.decider_loop.Observer."""
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
                self._send_later(turn.tool_s, CodeFinished(trajectory_id, call, outcome, turn.tool_s, EXECUTOR))
            case AnswerSubmitted(trajectory_id=trajectory_id):
                self._send_later(self._grading_s, AnswerGraded(trajectory_id, 1.0, self._grading_s, EXECUTOR))
            case _:
                pass

    def _send_later(self, seconds: float, message: AnyMessage) -> None:
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


def build_rules(work: Workload) -> Rules:
    return Rules(
        renderer=ChatMLRenderer(
            LengthTokenizer(), build_dialogue_format(DialogueConfig(tools=("jupyter_code",)), DEFAULT_TASK)
        ),
        response_tokens=work.response_tokens,
        max_turns=work.max_turns,
        max_calls_per_turn=1,
        result_characters=64,
        stop_token_ids=(),
        arbiter=ARBITER,
        buffer=BUFFER,
        launcher=LAUNCHER,
    )


def compute_capacity(work: Workload) -> Capacity:
    """Return the capacity of one engine."""
    longest = max(plan.prompt_tokens for plan in work.plans) + work.response_tokens
    kv_tokens = max(int(work.demand_tokens * SHARE / len(ENGINES)), longest + PAGE_TOKENS)
    return Capacity(kv_tokens // PAGE_TOKENS * PAGE_TOKENS, PAGE_TOKENS, longest)


async def drive(
    bus: Bus, work: Workload, policy: PolicyName, asked: Sequence[StartGroup], engines: Sequence[str] = ENGINES
) -> tuple[RolloutHarness, float]:
    """Run one step's rollouts of the groups in `asked`, after all engines join.

    Return the deciders' environment and the makespan in seconds. Raises StuckTrajectories.
    """
    outside = RolloutHarness(work, engines)
    outside.bus = bus
    deciders = {
        "arbiter": Arbiter(
            policy, work.response_tokens, rollout_address=ROLLOUT, address=ARBITER, observer_address=LAUNCHER
        ),
        "rollout": Rollout({"": build_rules(work)}),
    }
    services = {"buffer": outside.collect, "executor": outside.execute, "launcher": outside.ignore}
    loop = DeciderLoop(bus, None, deciders, services, make_steady_clock(), outside)
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
        raise StuckTrajectories(
            f"{policy}: {len(work.plans) - len(outside.finished)} trajectories have not ended"
        ) from None
    finally:
        for name in (*outside.joined, HEAD):
            await bus.send(name, Shutdown())
        await deciding
    return outside, makespan_s


async def _start_engine(setup: EngineSetup) -> asyncio.subprocess.Process:
    command = [sys.executable, "-m", "benchmarks.support.generator_process", msgspec.json.encode(setup).decode()]
    return await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)


async def measure(checkpoint: Path, shape: WorkloadShape, policy: PolicyName, seed: int) -> TwoEngineOutcome:
    work = draw_workload(shape, seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        setups = [
            EngineSetup(engine, ARBITER, str(folder), str(checkpoint), compute_capacity(work), 1, shape, seed)
            for engine in ENGINES
        ]
        processes = [await _start_engine(setup) for setup in setups]
        bus = open_zmq_bus(HEAD, folder, BusConfig().queue_messages)
        try:
            outside, makespan_s = await drive(bus, work, policy, build_groups(work, seed))
            lines = [(await process.communicate())[0] for process in processes]
        finally:
            for process in processes:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
            await bus.close()
    outcome = build_outcome(outside, makespan_s, [msgspec.json.decode(line, type=EngineCounts) for line in lines])
    assert outcome.generated_tokens == work.generated_tokens, "not every planned token was generated once"
    return outcome


def build_outcome(outside: RolloutHarness, makespan_s: float, counts: Sequence[EngineCounts]) -> TwoEngineOutcome:
    loads = [each.load for each in counts]
    generated, prefilled = (
        sum(getattr(load, f"{kind}_tokens") for load in loads) for kind in ("generated", "prefilled")
    )
    recomputed = prefilled - sum(each.first_prefills for each in counts)
    ended = [outside.finished[number] for number in sorted(outside.finished)]
    return TwoEngineOutcome(
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
        digests=compute_digests(ended),
    )


async def compare(
    checkpoint: Path, shape: WorkloadShape, seed: int, policies: Sequence[PolicyName], rounds: int
) -> dict[str, object]:
    """Compare the policies in alternating rounds, so that other load affects all of them.

    Return for each policy the round with the median time.
    """
    work = draw_workload(shape, seed)
    capacity = compute_capacity(work)
    print(
        f"{len(work.plans)} trajectories, {work.generated_tokens} tokens to generate, {work.demand_tokens} held at once "
        f"at their ends; {len(ENGINES)} engines with {capacity.kv_tokens} tokens each",
        flush=True,
    )
    outcomes: dict[PolicyName, list[TwoEngineOutcome]] = {policy: [] for policy in policies}
    for _ in range(rounds):
        for policy in policies:
            outcomes[policy].append(await measure(checkpoint, shape, policy, seed))
            print(_format_line(policy, outcomes[policy][-1]), flush=True)
    differing = compute_differing_share([outcome.digests for each in outcomes.values() for outcome in each])
    typical = {policy: _select_median(each) for policy, each in outcomes.items()}
    figures: dict[str, object] = {"two_engines": {policy: _format_figures(each) for policy, each in typical.items()}}
    figures["differing_trajectories_share"] = round(differing, 4)
    if {"kv_lookahead", "least_requests"} <= typical.keys():
        ours, theirs = typical["kv_lookahead"], typical["least_requests"]
        figures["kv_lookahead_over_least_requests"] = round(ours.tokens_per_s / theirs.tokens_per_s, 3)
    return figures


def compute_digests(ended: Sequence[TrajectoryFinished]) -> tuple[str, ...]:
    """Return a digest of each trajectory's tokens."""
    return tuple(hashlib.blake2b(each.record.token_ids, digest_size=8).hexdigest() for each in ended)


def compute_differing_share(rounds: Sequence[Sequence[str]]) -> float:
    """Return the share of trajectories with digests that differ between rounds, in [0, 1].

    Another batch size can change the last bits of a logit, and thereby a sampled token.
    """
    by_trajectory = list(zip(*rounds, strict=True))
    return sum(len(set(digests)) > 1 for digests in by_trajectory) / len(by_trajectory)


def _select_median(outcomes: Sequence[TwoEngineOutcome]) -> TwoEngineOutcome:
    """Return the outcome with the median makespan; for an even count, the faster of the two."""
    return sorted(outcomes, key=lambda outcome: outcome.makespan_s)[(len(outcomes) - 1) // 2]


def _format_figures(outcome: TwoEngineOutcome) -> dict[str, float | int]:
    fields = msgspec.structs.asdict(outcome)
    del fields["digests"]
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in fields.items()}


def _format_line(policy: PolicyName, outcome: TwoEngineOutcome) -> str:
    return (
        f"{policy:14} {outcome.makespan_s:6.2f} s {outcome.tokens_per_s:7.0f} tokens/s, "
        f"{outcome.recomputed_share:6.1%} recomputed, {outcome.evicted_tokens:6} tokens evicted, "
        f"{outcome.preempted:4} preempted, {outcome.migrations:4} moves, "
        f"batch {outcome.decode_batch:5.1f}, busy {outcome.busy_share:4.0%}, CPU {outcome.cpu_s:5.1f} s, lease wait {outcome.lease_wait_s:5.2f} s"
    )

"""A whole run in one process under a virtual clock: the real deciders, buses, receive loop and executors, and an
unreliable world.

Frames take a time that a seed draws, links overtake each other, engines and sandboxes break now and then, and executors
and engines are killed in the middle of their work and come back; what deciders hear may come twice, and late.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import count

import msgspec

from actors.decider_loop import DeciderLoop
from actors.executor import Executor
from actors.problems import Problems
from actors.wiring import HEAD, LAUNCHER, LEARNER, ROLLOUT, executors, generators, head_deciders
from bus.batching import batched
from bus.codec import encode
from bus.event_log import Decision, Event
from bus.messages import (
    AnswerSubmitted,
    AnyMessage,
    BatchReady,
    BufferCursor,
    CallsMoved,
    CodeOk,
    CodeRaised,
    CodeRequested,
    CodeTimedOut,
    EngineJoined,
    EngineLeft,
    Envelope,
    ExecutorJoined,
    ExecutorLeft,
    MetricsRecorded,
    Output,
    RunFinished,
    RunStarted,
    Shutdown,
    StepTrained,
    TurnFailed,
    TurnGenerated,
    TurnRequested,
    WeightsLoaded,
    WeightsPublished,
)
from bus.transport import Bus, Inbox
from configs.schema import Run
from policies.decider import Decider
from policies.group_buffer import Problem
from policies.record import ids_to_bytes
from policies.rollout import Rollout
from sandbox.contract import CodeResult, Grade, Isolation, SandboxFailure
from tests.fakes import END, TOKENIZER, generated_ids, rules
from tests.policies.leases import load

PAGE_TOKENS = 16
_HEARD_ONCE = (  # lives of processes, groups and steps are not remembered: a second word would count as a new one
    *(b"EngineJoined", b"EngineLeft", b"ExecutorJoined", b"ExecutorLeft"),
    *(b"StartGroup", b"StepRequested", b"EvaluationRequested"),
    *(b"StepTrained", b"WeightsPublished", b"WeightsLoaded", b"EvaluationFinished", b"StepCollected", b"RunStarted"),
)
CALL = '<tool_call>\n{"name": "jupyter_code", "arguments": {"code": "1"}}\n</tool_call>'
SAYINGS = (CALL, CALL + CALL, "</reason><answer>\\boxed{2}</answer>", "I give up", "<tool_call>{</tool_call>")


class MemoryLog:
    """The event log's interface, kept in memory so that nothing but the virtual clock moves."""

    full = False

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.decisions: dict[int, Decision] = {}

    def append(self, at: float, actor: str, sender: str, kind: str, trajectory: int | None, frame: bytes) -> int:
        self.events.append(Event(len(self.events) + 1, at, actor, sender, kind, trajectory, frame))
        return len(self.events)

    def decided(self, seq: int, effects: bytes, state: bytes | None) -> None:
        assert seq not in self.decisions
        self.decisions[seq] = Decision(seq, effects, state)


_APART_S = 1e-9  # between two frames of a link: the loop keeps no order among timers of one moment


class SlowTransport:
    """Delays every frame; keeps the order of each link, and of no others."""

    def __init__(self, world: World, process: str) -> None:
        self._world = world
        self._process = process
        self._arrival: dict[str, float] = {}

    async def send_frame(self, process: str, frame: bytes) -> None:
        loop = asyncio.get_running_loop()
        earliest = self._arrival.get(process, 0.0) + _APART_S
        self._arrival[process] = at = max(earliest, loop.time() + self._world.random.expovariate(200))
        loop.call_at(at, lambda: self._world.inboxes[process].put(frame))  # the inbox that is there then
        echoes = self._world.faults.echoes if process in (HEAD, ROLLOUT) else 0.0
        may_echo = echoes and not any(kind in frame for kind in _HEARD_ONCE)
        if may_echo and self._world.random.random() < echoes:
            self._world.num_echoes += 1
            again = at + self._world.random.expovariate(1)
            loop.call_at(again, lambda: self._world.inboxes[process].put(frame))

    async def close(self) -> None:
        pass


class NotebookSandbox:
    """Implements sandbox.contract.Sandbox. A cell's output is its place among those that the notebook remembers."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._notebooks: dict[int, list[int]] = {}
        self._turns: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def start(self) -> Isolation:
        return Isolation("simulated", (), False, ())

    async def run(self, call: CodeRequested) -> CodeResult:
        async with self._turns[call.trajectory_id]:
            return await self._cell(call)

    async def _cell(self, call: CodeRequested) -> CodeResult:
        draw = self._world.random.random
        await asyncio.sleep(self._world.random.choice([0.01, 0.1, 4.0]))
        if draw() < self._world.trouble:
            raise SandboxFailure("gone")
        cells = self._notebooks.setdefault(call.trajectory_id, [])
        if draw() < 0.1:
            return CodeResult(CodeTimedOut(Output(), 4.0), 4.0)
        cells.append(call.call)
        output = Output(f"cell {len(cells)}")
        return CodeResult(CodeOk(output) if draw() < 0.7 else CodeRaised(output, "E", "E"), 0.1)

    async def grade(self, submission: AnswerSubmitted) -> Grade:
        await asyncio.sleep(self._world.random.choice([0.01, 0.1, 4.0]))
        if self._world.random.random() < self._world.trouble:
            raise SandboxFailure("gone")
        return Grade(self._world.random.random() < 0.5, 0.01)

    def restore_session(self, trajectory_id: int, cells: Sequence[CodeRequested]) -> None:
        assert trajectory_id not in self._notebooks
        self._notebooks[trajectory_id] = [cell.call for cell in cells]

    async def end_session(self, trajectory_id: int) -> None:
        self._notebooks.pop(trajectory_id, None)

    async def close(self) -> None:
        pass


class Faults(msgspec.Struct, frozen=True):
    engine_deaths: float = 0.0  # that an engine dies a second; it comes back
    echoes: float = 0.0  # share of what the deciders hear that they hear again, a second later
    evictions: float = 0.0  # share of an engine's reports in which it has given up tokens by itself


PATIENCE_S = 3600.0  # virtual; a run that takes longer waits for something that never comes


class World:
    def __init__(self, run: Run, seed: int, trouble: float, kills: float = 0.0, faults: Faults | None = None) -> None:
        """`trouble` is the probability that an answer is a failure of infrastructure; `kills` how many deaths an
        executor dies a second."""
        self.faults = faults or Faults()
        self.num_echoes = 0
        self.num_engine_deaths = 0
        self.engine_lives: Counter[str] = Counter()
        self.engines_up: set[str] = set()  # addresses, each of one life: nothing for the first reaches the second
        self.under_way: defaultdict[str, dict[asyncio.Task[None], TurnRequested]] = defaultdict(dict)
        self.run = run
        self.random = random.Random(seed)
        self.trouble = trouble
        self.kills = kills
        self.num_killed = 0
        self.living: set[str] = set()
        self.joined: set[str] = set()
        self.moved: list[CallsMoved] = []
        self.inboxes: dict[str, Inbox] = {}
        self.logs = {HEAD: MemoryLog(), ROLLOUT: MemoryLog()}
        self.metrics: list[MetricsRecorded] = []
        self.batches: list[BatchReady] = []
        self.buses: dict[str, Bus] = {}
        self.sayings: dict[
            tuple[int, int], tuple[int, list[int]]
        ] = {}  # by trajectory and turn: from which byte, and what

    def problems(self) -> Problems:
        made = [Problem(f"q:{number}", "2", ids_to_bytes([65, 66, number])) for number in range(9)]
        return Problems(made, made[:4])

    def deciders(self) -> dict[str, Mapping[str, Decider]]:
        dialogue = self.run.dialogue
        limits = rules(response_tokens=dialogue.response_tokens, max_calls_per_turn=dialogue.max_calls_per_turn)
        rollout = Rollout(limits, TOKENIZER)
        return {HEAD: head_deciders(self.run, self.problems()), ROLLOUT: {ROLLOUT: rollout}}

    def _join(self, process: str) -> Bus:
        self.inboxes[process] = Inbox(100_000)
        self.buses[process] = self._bus(process)
        return self.buses[process]

    def _bus(self, process: str) -> Bus:
        bus = Bus(process, self.inboxes[process], SlowTransport(self, process))
        return batched(bus) if process.startswith(("rollout", "executor")) else bus

    async def live(self) -> RunFinished:
        """Until the launcher hears that the run is finished. Raises tests.simulation.clock.Deadlock."""
        engines = generators(self.run)
        for process in (HEAD, ROLLOUT, LEARNER, LAUNCHER, *executors(self.run), *engines):
            self._join(process)
        clock = asyncio.get_running_loop().time
        deciders = self.deciders()
        started = RunStarted(0, BufferCursor())
        for actor in deciders[HEAD]:
            await self.buses[HEAD].send(f"{HEAD}/{actor}", started)
        await self.buses[ROLLOUT].send(ROLLOUT, started)
        loops = [
            DeciderLoop(self.buses[process], self.logs[process], deciders[process], {"metrics": self._note}, clock)  # pyright: ignore
            for process in (HEAD, ROLLOUT)
        ]
        tasks = [asyncio.create_task(one.run()) for one in loops]
        tasks += [asyncio.create_task(self._run_engine(engine)) for engine in engines]
        tasks += [asyncio.create_task(self._keep(executor)) for executor in executors(self.run)]
        tasks.append(asyncio.create_task(self._serve(LEARNER, self._learn)))
        for engine in engines:
            await self._join_engine(engine)
            if self.faults.engine_deaths:
                tasks.append(asyncio.create_task(self._kill_engine(engine)))
                tasks.append(asyncio.create_task(self._report_load(engine)))
        await self._publish(0)
        async with asyncio.timeout(PATIENCE_S):
            finished = await self._lead()
        for process in (HEAD, ROLLOUT):
            self.inboxes[process].put(_shutdown(process))
        await asyncio.gather(*tasks[:2])
        for task in tasks:
            task.cancel()
        return finished

    async def _note(self, message: AnyMessage) -> None:
        assert isinstance(message, MetricsRecorded)
        self.metrics.append(message)

    async def _serve(self, process: str, answer: Callable[[str, Envelope], Awaitable[AnyMessage | None]]) -> None:
        """Every request takes its own time."""
        tasks: set[asyncio.Task[None]] = set()
        while True:
            envelope = await self.buses[process].receive()
            task = asyncio.create_task(self._answer(process, envelope, answer))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    async def _answer(
        self, process: str, envelope: Envelope, answer: Callable[[str, Envelope], Awaitable[AnyMessage | None]]
    ) -> None:
        message = await answer(process, envelope)
        if message is not None:
            await self.buses[process].send(envelope.sender, message)

    # ---------------------------------------------------------------- engines

    def _address(self, engine: str) -> str:
        return f"{engine}/{self.engine_lives[engine]}"

    async def _join_engine(self, name: str) -> None:
        self.engine_lives[name] += 1
        self.engines_up.add(self._address(name))
        joined = EngineJoined(self._address(name), self.run.engine.kv_tokens, PAGE_TOKENS, -1)
        await self.buses[LAUNCHER].send(f"{HEAD}/arbiter", joined)

    async def _run_engine(self, name: str) -> None:
        while True:
            envelope = await self.buses[name].receive()
            match envelope.message:
                case WeightsPublished(version=version):  # while it is dead: it comes back with them
                    await self.buses[name].send(envelope.sender, WeightsLoaded(name, version, 0.0))
                case TurnRequested() as turn if envelope.to in self.engines_up:
                    task = asyncio.create_task(self._generate(name, envelope.sender, turn))
                    self.under_way[name][task] = turn
                    self._check_room(name)
                case TurnRequested() as turn:
                    await self._fail_turn(name, turn)
                case _:
                    pass

    def _check_room(self, name: str) -> None:
        """What is asked for at once never exceeds what it has, unless the policy oversells. No prompt fills a page."""
        if self.run.arbiter.policy in ("kv", "kv_lookahead"):
            turns = self.under_way[name].values()
            pages = [-(-(len(turn.token_ids) // 4 + turn.max_new_tokens) // PAGE_TOKENS) for turn in turns]
            assert sum(pages) <= self.run.engine.kv_tokens // PAGE_TOKENS

    async def _generate(self, name: str, sender: str, turn: TurnRequested) -> None:
        await asyncio.sleep(self.random.expovariate(1))
        broken = self.random.random() < self.trouble
        failed = TurnFailed(turn.trajectory_id, turn.turn, turn.lease, "engine: gone")
        answer = failed if broken else self._say(turn)
        task = asyncio.current_task()
        assert task is not None
        self.under_way[name].pop(task, None)
        await self.buses[name].send(sender, answer)

    async def _kill_engine(self, name: str) -> None:
        """Again and again. The launcher says that it left, and that its turns are lost; of those some were answered at the
        last moment."""
        while True:
            await asyncio.sleep(self.random.expovariate(self.faults.engine_deaths))
            self.num_engine_deaths += 1
            self.engines_up.discard(self._address(name))
            lost, self.under_way[name] = self.under_way[name], {}
            left = EngineLeft(self._address(name), f"{name} was killed")
            await self.buses[LAUNCHER].send(f"{HEAD}/arbiter", left)
            for task, turn in lost.items():
                if self.random.random() < 0.5:
                    task.cancel()
                await self._fail_turn(name, turn)
            await asyncio.sleep(self.random.choice([0.0, self.random.expovariate(1)]))
            await self._join_engine(name)

    async def _fail_turn(self, name: str, turn: TurnRequested) -> None:
        failed = TurnFailed(turn.trajectory_id, turn.turn, turn.lease, f"engine left: {name} was killed")
        await self.buses[LAUNCHER].send(ROLLOUT, failed)

    async def _report_load(self, name: str) -> None:
        evicted = 0
        while True:
            await asyncio.sleep(0.25)
            if self._address(name) in self.engines_up and self.under_way[name]:
                evicted += self.random.random() < self.faults.evictions
                running = len(self.under_way[name])
                await self.buses[name].send(
                    f"{HEAD}/arbiter", load(self._address(name), running=running, evicted=evicted)
                )

    def _say(self, turn: TurnRequested) -> TurnGenerated:
        """As far as the lease goes; what is left unsaid is said under the next one, on whichever engine."""
        began_at, saying = self.sayings.setdefault(
            (turn.trajectory_id, turn.turn),
            (len(turn.token_ids), [*TOKENIZER.encode(self.random.choice(SAYINGS), trusted=True), END]),
        )
        left = saying[(len(turn.token_ids) - began_at) // 4 :]
        finish, count = ("stop", len(left)) if len(left) <= turn.max_new_tokens else ("length", turn.max_new_tokens)
        if self.random.random() < self.trouble:
            finish, count = "abort", self.random.randrange(count)
        return generated_ids(turn.trajectory_id, turn.turn, left[:count], finish, 3, turn.lease)

    # ---------------------------------------------------------------- executors

    async def _keep(self, name: str) -> None:
        """An executor's lives, as actors.executors has them: killed, and started again."""
        for life in count(1):
            address = f"{name}/{life}"
            await asyncio.sleep(self.random.expovariate(2))  # until its sandbox stands
            sandbox = NotebookSandbox(self)
            self.living.add(address)
            executor = Executor(self.buses[name], sandbox, address=address, slots=2, launcher=LAUNCHER)
            work = asyncio.create_task(executor.run())
            if not self.kills:
                await work
            await asyncio.sleep(self.random.expovariate(self.kills))
            work.cancel()
            await asyncio.wait([work])
            self.num_killed += 1
            self.living.discard(address)
            if self.random.random() < 0.5:  # what it had not read is lost with it, or is left to its next life
                self.inboxes[name] = Inbox(100_000)
                self.buses[name] = self._bus(name)
            if address in self.joined:
                await self.buses[LAUNCHER].send(ROLLOUT, ExecutorLeft(address, f"{name} was killed"))

    async def _lead(self) -> RunFinished:
        """The launcher's part."""
        while True:
            match (await self.buses[LAUNCHER].receive()).message:
                case RunFinished() as finished:
                    return finished
                case ExecutorJoined() as event:
                    if event.executor in self.living:
                        self.joined.add(event.executor)
                        await self.buses[LAUNCHER].send(ROLLOUT, event)
                case CallsMoved() as moved:
                    self.moved.append(moved)
                case _:
                    pass

    # ---------------------------------------------------------------- learner

    async def _learn(self, process: str, envelope: Envelope) -> AnyMessage | None:
        if isinstance(envelope.message, BatchReady):
            self.batches.append(envelope.message)
            await asyncio.sleep(1.0)
            await self.buses[LEARNER].send(f"{HEAD}/recipe", StepTrained(envelope.message.step, {"loss": 0.0}))
            await self._publish(envelope.message.step)
        return None

    async def _publish(self, version: int) -> None:
        await self.buses[LEARNER].send(f"{HEAD}/recipe", WeightsPublished(version, "/dev/shm/x", 4, "d"))


def _shutdown(process: str) -> bytes:
    return encode(Envelope(LAUNCHER, process, Shutdown()))

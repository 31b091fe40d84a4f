"""A whole run in one process under a virtual clock: the real deciders, buses, receive loop and executors, and an
unreliable world.

Frames take a time that a seed draws, links overtake each other, engines and sandboxes break now and then, and executors
and engines are killed in the middle of their work and come back; what deciders hear may come twice, and late.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import count

import msgspec

from actors.decider_loop import DeciderLoop
from actors.executor import Executor
from actors.generator import Generator
from actors.problems import Problems
from actors.wiring import HEAD, LAUNCHER, LEARNER, ROLLOUT, executors, generators, head_deciders
from bus.codec import encode
from bus.event_log import Decision, Event
from bus.lanes import CONTROL, Lane
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
    WeightsPublished,
)
from bus.transport import Bus, Delivery, Inbox, Sent, Taken
from configs.schema import Run
from engine.batches import check_versions
from policies.decider import Decider
from policies.group_buffer import Problem
from policies.record import ids_to_bytes
from policies.rollout import Rollout
from sandbox.contract import CodeResult, Grade, Isolation, SandboxFailure
from tests.fakes import TOKENIZER, rules
from tests.simulation.engines import SayingEngine, Script

_HEARS_TWICE = (HEAD, ROLLOUT, "generator-")  # executors, the learner and the launcher do not look for what comes twice


class MemoryLog:
    """The event log's interface, kept in memory so that nothing but the virtual clock moves."""

    full = False

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.decisions: dict[int, Decision] = {}
        self.on_commit: Callable[[int], object] = lambda seq: None

    def check(self) -> None:
        pass

    def append(
        self,
        at: float,
        actor: str,
        sender: str,
        kind: str,
        trajectory: int | None,
        frame: bytes,
        session: int = 0,
        number: int = 0,
    ) -> int:
        self.events.append(Event(len(self.events) + 1, at, actor, sender, session, number, kind, trajectory, frame))
        asyncio.get_running_loop().call_soon(self.on_commit, len(self.events))
        return len(self.events)

    def decided(self, seq: int, effects: bytes, state: bytes | None) -> None:
        assert seq not in self.decisions
        self.decisions[seq] = Decision(seq, effects, state)


_APART_S = 1e-9  # between two frames of a link: the loop keeps no order among timers of one moment


class SlowTransport:
    """Delays every frame; keeps the order of each lane of a link, and of no others. Implements bus.transport.Transport."""

    session = 0
    dropped = 0

    def __init__(self, world: World, process: str) -> None:
        self._world = world
        self._process = process
        self._arrival: dict[tuple[str, Lane], float] = {}
        self._numbers: defaultdict[tuple[str, Lane], int] = defaultdict(int)
        self.unacknowledged: dict[str, int] = {}

    async def send_frame(self, process: str, lane: Lane, frame: bytes) -> None:
        delivery = Delivery(frame, self._process, lane, self.session, self._numbers[process, lane])
        self._numbers[process, lane] += 1
        world, loop = self._world, asyncio.get_running_loop()
        delay_s = world.random.expovariate(200)
        if world.faults.lags and world.random.random() < world.faults.lags:
            delay_s += world.random.expovariate(1)
        earliest = self._arrival.get((process, lane), 0.0) + _APART_S
        self._arrival[process, lane] = at = max(earliest, loop.time() + delay_s)
        loop.call_at(at, lambda: world.inboxes[process].put(lane, [delivery]))  # the inbox that is there then
        if process.startswith(_HEARS_TWICE) and world.random.random() < world.faults.echoes:
            world.num_echoes += 1
            again = at + world.random.choice([world.random.expovariate(1), world.random.uniform(0, SETTLE_S / 2)])
            loop.call_at(again, lambda: world.inboxes[process].put(lane, [delivery]))

    def acknowledge(self, delivery: Delivery) -> None:
        pass

    def restore(self, sent: Sent, taken: Taken) -> None:
        raise NotImplementedError

    def forget(self, process: str) -> None:
        pass

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
    echoes: float = 0.0  # share of what deciders and engines hear that they hear again, sooner or later
    lags: float = 0.0  # share of all frames that take a second longer, and with them what follows on their link
    evictions: float = 0.0  # share of an engine's reports in which it has given up tokens by itself


PATIENCE_S = 3600.0  # virtual; a run that takes longer waits for something that never comes
SETTLE_S = 60.0  # virtual, after a run with echoes
LAST_WORDS_S = 5.0  # virtual: what is in one lane may come after what is in the other


class World:
    def __init__(self, run: Run, seed: int, trouble: float, kills: float = 0.0, faults: Faults | None = None) -> None:
        """`trouble` is the probability that an answer is a failure of infrastructure; `kills` how many deaths an
        executor dies a second."""
        self.faults = faults or Faults()
        self.num_echoes = 0
        self.num_engine_deaths = 0
        self.engines: dict[str, SayingEngine] = {}  # those of the present lives
        self.engine_lives: dict[str, int] = {}
        self.settling = False  # the run is finished: nobody is killed any more
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
        self.dead_buses: list[Bus] = []  # what they had taken to send is sent
        self.script = Script(self.random)

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
        return Bus(process, self.inboxes[process], SlowTransport(self, process))

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
        tasks += [asyncio.create_task(self._keep_engine(engine)) for engine in engines]
        tasks += [asyncio.create_task(self._keep(executor)) for executor in executors(self.run)]
        tasks.append(asyncio.create_task(self._serve(LEARNER, self._learn)))
        await self._publish(0)
        leading = asyncio.create_task(self._lead())
        done, _ = await asyncio.wait([leading, *tasks], timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
        for each in done:
            each.result()  # raises what broke one of them
        assert leading.done(), "somebody waits for what never comes"
        self.settling = True
        await asyncio.sleep(SETTLE_S if self.faults.echoes else LAST_WORDS_S)  # the latest of what comes twice
        for process in (HEAD, ROLLOUT):
            self.inboxes[process].put(CONTROL, [Delivery(_shutdown(process), LAUNCHER, CONTROL, 0, 0)])
        await asyncio.gather(*tasks[:2])
        for task in tasks:
            task.cancel()
        return leading.result()

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

    async def _keep_engine(self, name: str) -> None:
        """An engine's lives: it is killed, and comes back without weights."""
        for life in count(1):
            oversold = self.run.arbiter.policy not in ("kv", "kv_lookahead")
            self.engine_lives[name] = life
            engine = self.engines[name] = SayingEngine(
                self.random,
                self.script,
                self.run.engine.kv_tokens,
                version=-1,
                trouble=self.trouble,
                evictions=self.faults.evictions,
                oversold=oversold,
            )
            clock = asyncio.get_running_loop().time
            generator = Generator(name, self.buses[name], engine, f"{HEAD}/arbiter", life, clock, f"{HEAD}/recipe")
            work = asyncio.create_task(generator.run())
            lifetime_s = self.random.expovariate(self.faults.engine_deaths) if self.faults.engine_deaths else None
            await asyncio.wait([work], timeout=lifetime_s)
            if self.settling or work.done():
                await work  # raises what broke it: it never ends by itself
            await self._kill(work)
            self.num_engine_deaths += 1
            left = EngineLeft(name, f"{name} was killed", life)
            for told in (f"{HEAD}/arbiter", f"{HEAD}/recipe", ROLLOUT):
                await self.buses[LAUNCHER].send(told, left)
            await asyncio.sleep(self.random.choice([0.0, self.random.expovariate(1)]))
            self._lose_what_it_has_not_read(name)

    async def _kill(self, work: asyncio.Task[None]) -> None:
        work.cancel()
        await asyncio.wait([work])

    def _lose_what_it_has_not_read(self, process: str) -> None:
        """Or leave it to its next life."""
        if self.random.random() < 0.5:
            self.inboxes[process] = Inbox(100_000)
        self.dead_buses.append(self.buses[process])
        self.buses[process] = self._bus(process)

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
            await self._kill(work)
            self.num_killed += 1
            self.living.discard(address)
            self._lose_what_it_has_not_read(name)
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
            check_versions(envelope.message.rows, envelope.message.step, self.run.rl.max_staleness)
            self.batches.append(envelope.message)
            await asyncio.sleep(1.0)
            await self.buses[LEARNER].send(f"{HEAD}/recipe", StepTrained(envelope.message.step, {"loss": 0.0}))
            await self._publish(envelope.message.step)
        return None

    async def _publish(self, version: int) -> None:
        await self.buses[LEARNER].send(f"{HEAD}/recipe", WeightsPublished(version, "/dev/shm/x", 4, "d"))


def _shutdown(process: str) -> bytes:
    return encode(Envelope(LAUNCHER, process, Shutdown()))

"""A whole run in one process under a virtual clock: the real deciders, bus and receive loop, and an unreliable world.

Frames take a time that a seed draws, links overtake each other, engines and sandboxes break now and then.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping

from actors.decider_loop import DeciderLoop
from actors.problems import Problems
from actors.wiring import EXECUTOR, HEAD, LAUNCHER, LEARNER, ROLLOUT, generators, head_deciders
from bus.codec import encode
from bus.event_log import Decision, Event
from bus.messages import (
    AnswerGraded,
    AnswerSubmitted,
    AnyMessage,
    BatchReady,
    BufferCursor,
    CallFailed,
    CodeFinished,
    CodeOk,
    CodeRaised,
    CodeRequested,
    EngineJoined,
    Envelope,
    MetricsRecorded,
    Output,
    RunFinished,
    RunStarted,
    Shutdown,
    StepTrained,
    TurnFailed,
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
from tests.fakes import TOKENIZER, generated, rules

CALL = '<tool_call>\n{"name": "jupyter_code", "arguments": {"code": "1"}}\n</tool_call>'
SAYINGS = (CALL, "</reason><answer>\\boxed{2}</answer>", "I give up", "<tool_call>{</tool_call>")


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


class SlowTransport:
    """Delays every frame; keeps the order of each link, and of no others."""

    def __init__(self, world: World, process: str) -> None:
        self._world = world
        self._process = process
        self._arrival: dict[str, float] = {}

    async def send_frame(self, process: str, frame: bytes) -> None:
        loop = asyncio.get_running_loop()
        earliest = self._arrival.get(process, 0.0)
        self._arrival[process] = at = max(earliest, loop.time() + self._world.random.expovariate(200))
        loop.call_at(at, self._world.inboxes[process].put, frame)

    async def close(self) -> None:
        pass


class World:
    def __init__(self, run: Run, seed: int, trouble: float) -> None:
        self.run = run
        self.random = random.Random(seed)
        self.trouble = trouble  # probability that an answer is a failure of infrastructure
        self.inboxes: dict[str, Inbox] = {}
        self.logs = {HEAD: MemoryLog(), ROLLOUT: MemoryLog()}
        self.metrics: list[MetricsRecorded] = []
        self.batches: list[BatchReady] = []
        self.buses: dict[str, Bus] = {}

    def problems(self) -> Problems:
        made = [Problem(f"q:{number}", "2", ids_to_bytes([65, 66, number])) for number in range(9)]
        return Problems(made, made[:4])

    def deciders(self) -> dict[str, Mapping[str, Decider]]:
        rollout = Rollout(rules(response_tokens=self.run.dialogue.response_tokens), TOKENIZER)
        return {HEAD: head_deciders(self.run, self.problems()), ROLLOUT: {ROLLOUT: rollout}}

    def _join(self, process: str) -> Bus:
        inbox = self.inboxes[process] = Inbox(100_000)
        self.buses[process] = Bus(process, inbox, SlowTransport(self, process))
        return self.buses[process]

    async def live(self) -> RunFinished:
        """Until the launcher hears that the run is finished. Raises tests.simulation.clock.Deadlock."""
        engines = generators(self.run)
        for process in (HEAD, ROLLOUT, EXECUTOR, LEARNER, LAUNCHER, *engines):
            self._join(process)
        clock = asyncio.get_running_loop().time
        deciders = self.deciders()
        started = RunStarted(0, BufferCursor())
        for actor in deciders[HEAD]:
            await self.buses[HEAD].send(f"{HEAD}/{actor}", started)
        await self.buses[HEAD].send(ROLLOUT, started)
        loops = [
            DeciderLoop(self.buses[process], self.logs[process], deciders[process], {"metrics": self._note}, clock)  # pyright: ignore
            for process in (HEAD, ROLLOUT)
        ]
        tasks = [asyncio.create_task(one.run()) for one in loops]
        tasks += [asyncio.create_task(self._serve(engine, self._generate)) for engine in engines]
        tasks.append(asyncio.create_task(self._serve(EXECUTOR, self._execute)))
        tasks.append(asyncio.create_task(self._serve(LEARNER, self._learn)))
        for engine in engines:
            tokens = self.run.engine.kv_tokens
            await self.buses[engine].send(f"{HEAD}/arbiter", EngineJoined(engine, tokens, 16, -1))
        await self._publish(0)
        finished = await self._until_finished()
        for process in (HEAD, ROLLOUT):
            self.inboxes[process].put(_shutdown(process))
        await asyncio.gather(*tasks[:2])
        for task in tasks:
            task.cancel()
        return finished

    async def _until_finished(self) -> RunFinished:
        while True:
            message = (await self.buses[LAUNCHER].receive()).message
            if isinstance(message, RunFinished):
                return message

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

    async def _generate(self, process: str, envelope: Envelope) -> AnyMessage | None:
        match envelope.message:
            case WeightsPublished(version=version):
                return WeightsLoaded(process, version, 0.0)
            case TurnRequested() as turn:
                await asyncio.sleep(self.random.expovariate(1))
                if self.random.random() < self.trouble:
                    return TurnFailed(turn.trajectory_id, turn.turn, "engine: gone")
                saying = self.random.choice(SAYINGS)
                if len(saying) >= turn.max_new_tokens:
                    return generated(turn.trajectory_id, turn.turn, saying[: turn.max_new_tokens], "length")
                finish = "abort" if self.random.random() < self.trouble else "stop"
                return generated(turn.trajectory_id, turn.turn, saying if finish == "stop" else "well, ", finish)
            case _:
                return None

    async def _execute(self, process: str, envelope: Envelope) -> AnyMessage | None:
        await asyncio.sleep(self.random.choice([0.01, 0.1, 4.0]))
        broken = self.random.random() < self.trouble
        match envelope.message:
            case CodeRequested(trajectory_id=tid, call=call):
                if broken:
                    return CallFailed(tid, call, "sandbox: gone")
                fine = self.random.random() < 0.7
                return CodeFinished(tid, call, CodeOk(Output("2")) if fine else CodeRaised(Output(), "E", "E"), 0.1)
            case AnswerSubmitted(trajectory_id=tid):
                if broken:
                    return CallFailed(tid, -1, "grader: gone")
                return AnswerGraded(tid, self.random.random() < 0.5, 0.01)
            case _:
                return None

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

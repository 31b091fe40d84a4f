"""A whole run in one process under a virtual clock, with injected faults.

The deciders, links, receive loops, recovery, generators, executors and supervisor are real.

The seed determines the delay of each frame. Connections break, repeat frames, and partition
(tests.simulation.network). Engines and sandboxes fail at random. Each process is killed during its
work, and the launcher restarts it: a decider process recovers from its log, the learner from its
checkpoint and journal, and the other processes start without state. A disaster kills all processes,
with or without the launcher; if the launcher is killed, a new launch resumes the run.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

import msgspec

from actors.executor import Executor
from actors.generator import Generator
from actors.launch.launcher import compute_link_epoch
from actors.runtime.decider_loop import DeciderLoop
from actors.runtime.decider_process import resume_from_log
from actors.runtime.prompts import ProblemSets
from actors.runtime.recovery import Recovery
from actors.runtime.resume_point import choose_newest_complete_step
from actors.runtime.wiring import build_head_deciders, list_executors
from bus.addresses import HEAD, LAUNCHER, LEARNER, ROLLOUT
from bus.bus import Bus
from bus.codec import decode, encode
from bus.messages import (
    AnyMessage,
    BatchReady,
    BufferCursor,
    CallsRescheduled,
    Envelope,
    MetricsRecorded,
    RunFinished,
    RunStarted,
    StepCollected,
    ids_to_bytes,
)
from bus.transport.reliable_transport import LinkLimits
from configs.schema import RunConfig
from engine.learner.learner import EngineGpuMemory
from policies.decider import Decider
from policies.groups.group_starter import TokenizedProblem
from policies.recipe import Recipe
from policies.rollout.rollout import Rollout
from policies.rollout.trajectory import Rules
from tests.fakes import TOKENIZER, rules
from tests.simulation.engines import SayingEngine, Script
from tests.simulation.launching import Launch
from tests.simulation.learner import Disk, SimulatedLearner
from tests.simulation.memory_log import Kept, MemoryLog
from tests.simulation.network import ECHO_WITHIN_S, Network, Weather
from tests.simulation.processes import SimulatedProcess
from tests.simulation.sandboxes import NotebookSandbox
from tests.simulation.waiting import who_waits

UNREST_S = 300.0  # virtual time from the start; all faults end then
PATIENCE_S = 600.0  # virtual time; a longer run is a deadlock
SETTLE_S = 15.0  # virtual time for retransmissions and duplicate frames
_EXECUTOR, _GENERATOR = "executor", "generator"


class Faults(Weather, frozen=True):
    engine_deaths: float = 0.0  # rate per second and process; the launcher restarts it
    executor_deaths: float = 0.0
    learner_deaths: float = 0.0
    decider_deaths: float = 0.0  # probability of a kill per event of head or rollout
    false_starts: float = 0.0  # probability of a kill at the start of a life
    disasters: float = 0.0  # rate per second: all processes die, half the time with the launcher
    partitions: float = 0.0  # rate per second: two processes lose their connection for some time
    evictions: float = 0.0  # probability of an eviction per load report of an engine


class Life(msgspec.Struct, eq=False):
    """One life of one process in one launch."""

    name: str
    number: int
    session: int
    process: SimulatedProcess
    work: asyncio.Task[None] | None = None
    bus: Bus | None = None
    log: MemoryLog | None = None


class World:
    def __init__(self, run: RunConfig, seed: int, trouble: float, faults: Faults | None = None) -> None:
        """`trouble` is the probability of an infrastructure failure per answer."""
        self.run, self.trouble, self.faults = run, trouble, faults or Faults()
        self.random = random.Random(seed)
        self.network: Network
        self.launch: Launch
        self.lives: dict[str, Life] = {}  # current lives by process name
        self.deaths: Counter[str] = Counter()  # number of kills by kind of process
        self.checked_loans = 0  # number of engines checked during a memory loan
        self.history: list[str] = []
        self.settling = False  # no further faults
        self.first_step = 0  # the current launch resumes after this step
        self.without_line: set[int] = set()  # steps without a metrics line, up to a resume step
        self.logs = {HEAD: Kept(), ROLLOUT: Kept()}
        self.present: dict[str, Mapping[str, Decider]] = {}  # deciders by process
        self.engines: dict[str, SayingEngine] = {}  # engines by generator, current lives only
        self.disk = Disk()
        self.metrics: list[MetricsRecorded] = []
        self.moved: list[CallsRescheduled] = []
        self.script = Script(self.random)
        self._broken: asyncio.Future[None]
        self._over: asyncio.Future[None]  # done when the launcher is killed

    @property
    def batches(self) -> list[BatchReady]:
        return self.disk.batches

    @property
    def engine_lives(self) -> dict[str, int]:
        return {name: life.number for name, life in self.lives.items() if name.startswith(_GENERATOR)}

    def problems(self) -> ProblemSets:
        made = [TokenizedProblem(f"q:{number}", "2", ids_to_bytes([65, 66, number])) for number in range(9)]
        return ProblemSets(made, made[:4])

    @property
    def rules(self) -> Rules:
        dialogue = self.run.dialogue
        return rules(response_tokens=dialogue.response_tokens, max_calls_per_turn=dialogue.max_calls_per_turn)

    def deciders(self) -> dict[str, Mapping[str, Decider]]:
        rollout = Rollout(self.rules, TOKENIZER)
        return {HEAD: build_head_deciders(self.run, self.problems()), ROLLOUT: {ROLLOUT: rollout}}

    # ---------------------------------------------------------------- the run

    async def live(self) -> RunFinished:
        """Run until completion, check that the bus is idle, and stop all processes.

        Raises Deadlock, or the first error of any process.
        """
        loop = asyncio.get_running_loop()
        self._broken = loop.create_future()
        loop.set_exception_handler(lambda _, context: self._break(context.get("exception") or Exception(str(context))))
        self.network = Network(
            self.random, self.faults, LinkLimits(self.run.bus.queue_messages, ack_delay_s=0.1, probe_after_s=1.0)
        )
        happening = [asyncio.create_task(each) for each in (self._part_some(), self._kill_all())]
        calming = loop.call_at(UNREST_S, self._calm, happening)
        finished = await self._until_finished()
        calming.cancel()
        self._calm(happening)
        await asyncio.sleep(SETTLE_S + 2 * ECHO_WITHIN_S * bool(self.faults.echoes))
        self._check_that_all_is_quiet()
        stopping = asyncio.ensure_future(self.launch.stop())
        await asyncio.wait([stopping, self._broken], timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
        if self._broken.done():
            self._broken.result()
        left = [life.name for life in self.lives.values() if life.process.returncode is None]
        assert stopping.done(), f"{left} do not end when they are told to: {who_waits(self)}"
        return finished

    def _calm(self, happening: Sequence[asyncio.Task[None]]) -> None:
        for each in happening:
            each.cancel()
        self.settling = True
        self.network.heal()

    async def _until_finished(self) -> RunFinished:
        """Start launches until one finishes the run."""
        for boot in range(1, 1_000):
            self._over = asyncio.get_running_loop().create_future()
            if boot > 1:
                self._resume()
            bus = self.network.join(LAUNCHER, compute_link_epoch(boot))
            self.launch = Launch(self.run, bus, boot, self._begin)
            following = asyncio.create_task(self.launch.follow(), name=LAUNCHER)
            events = [following, self._broken, self._over]
            left_s = PATIENCE_S - asyncio.get_running_loop().time()
            await asyncio.wait(events, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            self.moved += self.launch.moved
            if self._broken.done():
                self._broken.result()
            if following.done():
                return following.result()
            assert self._over.done(), f"somebody waits for what never comes: {who_waits(self)}"
            following.cancel()
            await self.launch.die()
            await bus.close()
        raise AssertionError("it never came to its end")

    def _resume(self) -> None:
        """Resume the run as actors.launch.launcher does with --resume."""
        known = {0, *self._cursors()}
        written = {line.step for line in self.metrics if line.kind == "step"}
        self.first_step = choose_newest_complete_step(known & self.disk.checkpoints, written) or 0
        self.without_line |= {*range(1, self.first_step + 1)} - written
        self.disk.go_back_to(self.first_step)
        self.metrics = [line for line in self.metrics if line.step <= self.first_step] if self.first_step else []

    def _cursors(self) -> dict[int, BufferCursor]:
        """Return the buffer cursor of each collected step, as actors.runtime.resume_point does."""
        collected = [decode(event.frame).message for event in self.logs[HEAD].events if event.kind == "StepCollected"]
        return {message.step: message.cursor for message in collected if isinstance(message, StepCollected)}

    def _check_that_all_is_quiet(self) -> None:
        """Check that no live process has unacknowledged or unread messages.

        Messages for a dead executor may remain until its restart.
        """
        dead = {name for name, life in self.lives.items() if life.bus is None or life.process.returncode is not None}
        for life in self.lives.values():
            if life.name in dead or life.bus is None:
                assert life.name.startswith(_EXECUTOR)  # long restart backoff
                continue
            held = {peer: count for peer, count in life.bus.unacknowledged.items() if peer not in dead}
            assert not held, f"{life.name} holds what is not acknowledged: {held}; {who_waits(self)}"
            assert not life.bus.waiting, f"{life.name} does not read: {who_waits(self)}"
        assert not self.launch.bus.unacknowledged

    def _break(self, error: BaseException) -> None:
        if not self._broken.done():
            self._broken.set_exception(error)

    # ---------------------------------------------------------------- lives

    def _begin(self, name: str, number: int, session: int) -> SimulatedProcess:
        life = self.lives[name] = Life(name, number, session, SimulatedProcess())
        life.work = asyncio.create_task(self._live(life), name=f"{name}/{number}")
        kind, loop = name.partition("-")[0], asyncio.get_running_loop()
        rates = {_GENERATOR: self.faults.engine_deaths, _EXECUTOR: self.faults.executor_deaths}
        rate = {**rates, LEARNER: self.faults.learner_deaths}.get(kind, 0.0)
        if self.faults.false_starts and self.random.random() < self.faults.false_starts:
            loop.call_later(self.random.expovariate(20), self.kill, life)
        if rate:
            loop.call_later(self.random.expovariate(rate), self.kill, life)
        return life.process

    async def _live(self, life: Life) -> None:
        try:
            await self._work_of(life)
        except Exception as error:
            self._break(error)
        finally:
            if life.bus is not None:
                await life.bus.close()
        life.process.end(0)

    def kill(self, life: Life) -> None:
        """Kill a process unless it has exited or the faults have ended."""
        if self.settling or life.process.returncode is not None:
            return
        self.deaths[life.name.partition("-")[0]] += 1
        self._say(f"{life.name}/{life.number} is killed")
        if life.bus is not None:
            self.network.kill(life.name)
        if life.log is not None:
            life.log.kill()
        assert life.work is not None
        life.work.cancel()
        life.process.end(-9)

    def _say(self, what: str) -> None:
        self.history.append(f"{asyncio.get_running_loop().time():8.3f} s  {what}")

    def _join(self, life: Life) -> Bus:
        life.bus = self.network.join(life.name, life.session)
        return life.bus

    async def _moment(self, per_s: float = 20.0) -> None:
        await asyncio.sleep(self.random.expovariate(per_s))

    def _work_of(self, life: Life) -> Coroutine[Any, Any, None]:
        if life.name in (HEAD, ROLLOUT):
            return self._decide(life)
        if life.name == LEARNER:
            return self._learn(life)
        return self._execute(life) if life.name in list_executors(self.run) else self._generate(life)

    # ---------------------------------------------------------------- work of each process

    async def _decide(self, life: Life) -> None:
        """Run deciders as actors.process and actors.runtime.decider_process do."""
        await self._moment()
        name, deciders = life.name, self.deciders()[life.name]
        begin = [
            encode(Envelope(name, name if actor == name else f"{name}/{actor}", self._started(name)))
            for actor in deciders
        ]
        services = {"metrics": self._note} if name == HEAD else {}
        kept, recovery = self.logs[name], None
        if (first := kept.find_epoch_start(life.session)) is not None:
            recovery = Recovery(name, life.session, deciders, services, self.run.bus.queue_messages)
            recovery.replay(kept.since(first), begin)
        life.log = log = MemoryLog(kept, self.random, lambda: self._may_kill(life))
        bus = self._join(life)
        self.present[name] = deciders
        if recovery is None:
            for frame in begin:
                await bus.send_frame(name, frame)
        else:
            await resume_from_log(recovery, log, bus, services)
        clock = asyncio.get_running_loop().time
        await DeciderLoop(bus, log, deciders, services, clock).run()

    def _started(self, name: str) -> RunStarted:
        cursor = self._cursors()[self.first_step] if name == HEAD and self.first_step else BufferCursor()
        return RunStarted(self.first_step, cursor)

    def _may_kill(self, life: Life) -> None:
        """Schedule a kill of a decider process at random.

        The kill falls before the log write of the last events, before its confirmation, or later.
        """
        if self.faults.decider_deaths and self.random.random() < self.faults.decider_deaths:
            after_s = self.random.expovariate(self.random.choice([50.0, 1000.0]))
            asyncio.get_running_loop().call_later(after_s, self.kill, life)

    async def _note(self, message: AnyMessage) -> None:
        """Store one metrics line per subject, as actors.metrics_file.MetricsFile does."""
        assert isinstance(message, MetricsRecorded)
        subject = (message.kind, message.step, message.label)
        same = [line for line in self.metrics if (line.kind, line.step, line.label) == subject]
        if not same:
            self.metrics.append(message)

    async def _generate(self, life: Life) -> None:
        await self._moment()
        engine = self.engines[life.name] = SayingEngine(
            self.random,
            self.script,
            self.run.engine.kv_tokens,
            version=-1,
            trouble=self.trouble,
            evictions=self.faults.evictions,
            oversold=self.run.arbiter.policy not in ("worst_case", "kv_lookahead"),
        )
        clock = asyncio.get_running_loop().time
        bus = self._join(life)
        await Generator(life.name, bus, engine, f"{HEAD}/arbiter", life.number, clock, f"{HEAD}/recipe").run()

    async def _execute(self, life: Life) -> None:
        await self._moment(2.0)
        sandbox = NotebookSandbox(self.random, self.trouble)
        address = f"{life.name}/{life.number}"
        await Executor(self._join(life), sandbox, address=address, slots=2, launcher=LAUNCHER).run()

    async def _learn(self, life: Life) -> None:
        """Run the learner as engine.learner.learner does.

        The first life starts from the step of the launch, a later life from the newest checkpoint.
        """
        await self._moment(2.0)
        run = self.run
        every, staleness, bus = run.learner.checkpoint_every, run.rl.max_staleness, self._join(life)
        learner = SimulatedLearner(
            *(bus, self.disk, self.random, EngineGpuMemory(bus, life.number, is_shared=run.sglang.colocate)),
            steps=run.rl.steps,
            checkpoint_every=every,
            staleness=staleness,
            computing=self._check_the_loan if run.sglang.colocate else lambda: None,
        )
        await learner.run(self.first_step if life.number == 1 else None)

    def _check_the_loan(self) -> None:
        """Check that the learner holds a granted loan and each sleeping engine is released."""
        recipe = self.present[HEAD]["recipe"]
        assert isinstance(recipe, Recipe)
        loan = recipe.state.open_handover
        assert loan is not None and loan.phase == "granted", "the learner has not been lent any memory"
        for name, number in loan.sleeping.items():
            life = self.lives[name]
            if life.number == number and life.process.returncode is None:
                self.checked_loans += 1
                assert self.engines[name].released, f"{name} keeps the memory that it has lent"

    # ---------------------------------------------------------------- faults

    async def _part_some(self) -> None:
        while self.faults.partitions:
            await asyncio.sleep(self.random.expovariate(self.faults.partitions))
            one, other = self.random.sample([LAUNCHER, *self.lives], 2)
            seconds = self.random.expovariate(0.5)
            self._say(f"{one} and {other} are parted for {seconds:.1f} s")
            self.network.part(one, other, seconds)

    async def _kill_all(self) -> None:
        while self.faults.disasters:
            await asyncio.sleep(self.random.expovariate(self.faults.disasters))
            self.kill_all(with_launcher=self.random.random() < 0.5)

    def kill_all(self, *, with_launcher: bool) -> None:
        for life in list(self.lives.values()):
            self.kill(life)
        if with_launcher:
            self._say("the launcher is killed")
            self.deaths["launcher"] += 1
            self.network.kill(LAUNCHER)
            self._over.set_result(None)

"""A whole run in one process under a virtual clock, with injected faults.

The deciders, links, receive loops, recovery, generators, executors and supervisor are real.

The seed determines the delay of each frame. Connections break, repeat frames, and partition
(tests.simulation.network). Engines and sandboxes fail at random. Each process is killed during its
work, and the launcher restarts it: a decider process recovers from its log, the learner from its
checkpoint and journal, and the other processes start without state. A disaster kills all processes,
with or without the launcher; if the launcher is killed, a new launch resumes the run.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Self

import msgspec
from structlog.testing import capture_logs

from asterism.actors.launch.launcher import compute_link_epoch
from asterism.actors.runtime.resume_point import choose_newest_complete_step
from asterism.actors.runtime.wiring import ProblemSets, build_head_deciders
from asterism.bus import messages as msg
from asterism.bus.addresses import HEAD, LAUNCHER, LEARNER, ROLLOUT
from asterism.bus.bus import Bus
from asterism.bus.codec import decode
from asterism.bus.transport.reliable_transport import LinkLimits
from asterism.configs.schema.run_config import RunConfig
from asterism.configs.schema.tasks import TaskConfig
from asterism.policies.decider import Decider
from asterism.policies.dialogue.chat_format import build_dialogue_format
from asterism.policies.groups.group_starter import ProblemSet, TokenizedProblem
from asterism.policies.rollout.rollout import Rollout
from asterism.policies.rollout.trajectory import Rules
from asterism.policies.tools.task_description import TaskDescriptions
from asterism.tasks.math_python import MATH_PYTHON
from tests.batches import CompleteBatch
from tests.fakes import rules
from tests.simulation.clock import run_virtually
from tests.simulation.engines import TASK_TEXTS, TURN_TEXTS, Script, ScriptedEngine
from tests.simulation.launching import Launch
from tests.simulation.learner import Disk
from tests.simulation.memory_log import CommittedLog, MemoryLog
from tests.simulation.network import ECHO_WITHIN_S, Network, NetworkFaults
from tests.simulation.process_work import run_process
from tests.simulation.processes import SimulatedProcess
from tests.simulation.waiting import describe_waits

FAULTS_END_S = 300.0  # virtual seconds until all faults end
TIMEOUT_S = 600.0  # virtual seconds; a longer run counts as a deadlock
SETTLE_S = 15.0  # virtual seconds for retransmissions and duplicate frames
_EXECUTOR, _GENERATOR = "executor", "generator"


class Faults(NetworkFaults, frozen=True):
    engine_deaths: float = 0.0  # kills per second for each generator, which the launcher restarts
    executor_deaths: float = 0.0
    learner_deaths: float = 0.0
    decider_deaths: float = 0.0  # probability of a kill per event of head or rollout
    false_starts: float = 0.0  # probability of a kill at the start of an incarnation
    disasters: float = 0.0  # kills of all processes per second; half of them include the launcher
    partitions: float = 0.0  # partitions per second; each disconnects two processes for some time
    evictions: float = 0.0  # probability of an eviction per load report of an engine


def _make_problems(tasks: Sequence[str], count: int) -> ProblemSet:
    """Make `count` problems of each task."""
    made = [
        TokenizedProblem(f"q:{number}", "2", msg.ids_to_bytes([65, 66, number]), b"{}" if task else b"", task)
        for task in tasks
        for number in range(count)
    ]
    return ProblemSet(made, (count,) * len(tasks))


class Incarnation(msgspec.Struct, eq=False):
    """One incarnation of one process in one launch."""

    name: str
    number: int
    epoch: int
    process: SimulatedProcess
    work: asyncio.Task[None] | None = None
    bus: Bus | None = None
    log: MemoryLog | None = None


class World:
    def __init__(
        self,
        run: RunConfig,
        seed: int,
        failure_rate: float,
        faults: Faults | None = None,
        descriptions: TaskDescriptions | None = None,
    ) -> None:
        """`failure_rate` is the probability that an answer is an infrastructure failure. `descriptions` are by task."""
        self.descriptions = descriptions or {}
        self.run, self.failure_rate, self.faults = run, failure_rate, faults or Faults()
        self.random = random.Random(seed)
        self.network: Network
        self.launch: Launch
        self.incarnations: dict[str, Incarnation] = {}  # current incarnations by process name
        self.deaths: Counter[str] = Counter()  # number of kills by kind of process
        self.checked_loans = 0  # number of engines that were checked while the learner used their memory
        self.history: list[str] = []
        self.settling = False  # True after the end of the faults
        self.first_step = 0  # step after which the current launch resumes
        self.steps_without_metrics: set[int] = set()  # steps before a resume that have no metrics line
        self.logs = {HEAD: CommittedLog(), ROLLOUT: CommittedLog()}
        self.current_deciders: dict[str, Mapping[str, Decider]] = {}  # deciders by process
        self.engines: dict[str, ScriptedEngine] = {}  # engines of current incarnations, by generator
        self.disk = Disk()
        self.metrics: list[msg.MetricsRecorded] = []
        self.rescheduled: list[msg.CallsRescheduled] = []
        self.script = Script(self.random, TASK_TEXTS if self.descriptions else TURN_TEXTS)
        self._failure: asyncio.Future[None]
        self._launcher_killed: asyncio.Future[None]  # done when the launcher is killed

    @property
    def batches(self) -> list[CompleteBatch]:
        return self.disk.batches

    @property
    def engine_incarnations(self) -> dict[str, int]:
        return {name: each.number for name, each in self.incarnations.items() if name.startswith(_GENERATOR)}

    def problems(self) -> ProblemSets:
        tasks = [task.name for task in self.run.resolved_tasks]
        return ProblemSets(_make_problems(tasks, 9), _make_problems(tasks, 4))

    def build_rules(self, task: TaskConfig) -> Rules:
        dialogue, description = task.get_dialogue(), self.descriptions.get(task.name, MATH_PYTHON)
        return rules(
            dialogue=build_dialogue_format(dialogue, description),
            kind=description.kind,
            response_tokens=dialogue.response_tokens,
            max_calls_per_turn=dialogue.max_calls_per_turn,
        )

    def deciders(self) -> dict[str, Mapping[str, Decider]]:
        rollout = Rollout({task.name: self.build_rules(task) for task in self.run.resolved_tasks})
        return {HEAD: build_head_deciders(self.run, self.problems()), ROLLOUT: {ROLLOUT: rollout}}

    # ---------------------------------------------------------------- the run

    def play(self) -> Self:
        """Run all steps under a virtual clock."""
        with capture_logs():  # printed lines would take a quarter of the time
            assert run_virtually(self.simulate()) == msg.RunFinished(self.run.rl.steps)
        return self

    async def simulate(self) -> msg.RunFinished:
        """Run until completion, check that the bus is idle, and stop all processes.

        Raises Deadlock, or the first error of any process.
        """
        loop = asyncio.get_running_loop()
        self._failure = loop.create_future()
        loop.set_exception_handler(lambda _, context: self._fail(context.get("exception") or Exception(str(context))))
        self.network = Network(
            self.random, self.faults, LinkLimits(self.run.bus.queue_messages, ack_delay_s=0.1, probe_after_s=1.0)
        )
        fault_tasks = [asyncio.create_task(each) for each in (self._partition_at_random(), self._kill_all_at_random())]
        faults_end = loop.call_at(FAULTS_END_S, self._end_faults, fault_tasks)
        finished = await self._until_finished()
        faults_end.cancel()
        self._end_faults(fault_tasks)
        await asyncio.sleep(SETTLE_S + 2 * ECHO_WITHIN_S * bool(self.faults.echoes))
        self._check_idle()
        stopping = asyncio.ensure_future(self.launch.stop())
        await asyncio.wait([stopping, self._failure], timeout=TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        if self._failure.done():
            self._failure.result()
        left = [each.name for each in self.incarnations.values() if each.process.returncode is None]
        assert stopping.done(), f"{left} do not end after Shutdown: {describe_waits(self)}"
        return finished

    def _end_faults(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.cancel()
        self.settling = True
        self.network.heal()

    async def _until_finished(self) -> msg.RunFinished:
        """Start launches until one finishes the run."""
        for boot in range(1, 1_000):
            self._launcher_killed = asyncio.get_running_loop().create_future()
            if boot > 1:
                self._resume()
            bus = self.network.join(LAUNCHER, compute_link_epoch(boot))
            self.launch = Launch(self.run, bus, boot, self._start_process, partial(self.kill_all, with_launcher=True))
            following = asyncio.create_task(self.launch.follow(), name=LAUNCHER)
            events = [following, self._failure, self._launcher_killed]
            left_s = TIMEOUT_S - asyncio.get_running_loop().time()
            await asyncio.wait(events, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            self.rescheduled += self.launch.rescheduled
            if self._failure.done():
                self._failure.result()
            if following.done():
                return following.result()
            assert self._launcher_killed.done(), f"deadlock: {describe_waits(self)}"
            following.cancel()
            await self.launch.die()
            await bus.close()
        raise AssertionError("the run did not finish within 1,000 launches")

    def _resume(self) -> None:
        """Resume the run as asterism.actors.launch.launcher does with --resume."""
        collected = {0, *self.read_cursors()}
        written = {line.step for line in self.metrics if line.kind == "step"}
        self.first_step = choose_newest_complete_step(collected & self.disk.checkpoints, written) or 0
        self.steps_without_metrics |= {*range(1, self.first_step + 1)} - written
        self.disk.go_back_to(self.first_step)
        self.metrics = [line for line in self.metrics if line.step <= self.first_step] if self.first_step else []

    def read_cursors(self) -> dict[int, msg.BufferCursor]:
        """Return the buffer cursor of each collected step, as asterism.actors.runtime.resume_point does."""
        collected = [decode(event.frame).message for event in self.logs[HEAD].events if event.kind == "StepCollected"]
        return {message.step: message.cursor for message in collected if isinstance(message, msg.StepCollected)}

    def _check_idle(self) -> None:
        """Check that no live process has unacknowledged or unread messages.

        Messages to a dead executor can remain until its restart.
        """
        dead = {
            name for name, each in self.incarnations.items() if each.bus is None or each.process.returncode is not None
        }
        for incarnation in self.incarnations.values():
            if incarnation.name in dead or incarnation.bus is None:
                assert incarnation.name.startswith(_EXECUTOR)  # only executors have a long restart backoff
                continue
            held = {peer: count for peer, count in incarnation.bus.unacknowledged.items() if peer not in dead}
            assert not held, f"{incarnation.name} has unacknowledged frames: {held}; {describe_waits(self)}"
            assert not incarnation.bus.waiting, f"{incarnation.name} has unread frames: {describe_waits(self)}"
        assert not self.launch.bus.unacknowledged

    def _fail(self, error: BaseException) -> None:
        if not self._failure.done():
            self._failure.set_exception(error)

    # ---------------------------------------------------------------- incarnations

    def _start_process(self, name: str, number: int, epoch: int) -> SimulatedProcess:
        incarnation = self.incarnations[name] = Incarnation(name, number, epoch, SimulatedProcess())
        incarnation.work = asyncio.create_task(self._run(incarnation), name=f"{name}/{number}")
        kind, loop = name.partition("-")[0], asyncio.get_running_loop()
        rates = {_GENERATOR: self.faults.engine_deaths, _EXECUTOR: self.faults.executor_deaths}
        rate = {**rates, LEARNER: self.faults.learner_deaths}.get(kind, 0.0)
        if self.faults.false_starts and self.random.random() < self.faults.false_starts:
            loop.call_later(self.random.expovariate(20), self.kill, incarnation)
        if rate:
            loop.call_later(self.random.expovariate(rate), self.kill, incarnation)
        return incarnation.process

    async def _run(self, incarnation: Incarnation) -> None:
        try:
            await run_process(self, incarnation)
        except Exception as error:
            self._fail(error)
        finally:
            if incarnation.bus is not None:
                await incarnation.bus.close()
        incarnation.process.end(0)

    def kill(self, incarnation: Incarnation) -> None:
        """Kill a process unless it has exited or the faults have ended."""
        if self.settling or incarnation.process.returncode is not None:
            return
        self.deaths[incarnation.name.partition("-")[0]] += 1
        self._record(f"{incarnation.name}/{incarnation.number} is killed")
        if incarnation.bus is not None:
            self.network.kill(incarnation.name)
        if incarnation.log is not None:
            incarnation.log.kill()
        assert incarnation.work is not None
        incarnation.work.cancel()
        incarnation.process.end(-9)

    def _record(self, event: str) -> None:
        self.history.append(f"{asyncio.get_running_loop().time():8.3f} s  {event}")

    def join(self, incarnation: Incarnation) -> Bus:
        incarnation.bus = self.network.join(incarnation.name, incarnation.epoch)
        return incarnation.bus

    async def store_metrics(self, message: msg.AnyMessage) -> None:
        """Store one metrics line per subject, as asterism.actors.metrics_file.MetricsFile does."""
        if isinstance(message, msg.HealthReported):
            return
        assert isinstance(message, msg.MetricsRecorded)
        subject = (message.kind, message.step, message.label)
        if all((line.kind, line.step, line.label) != subject for line in self.metrics):
            self.metrics.append(message)

    # ---------------------------------------------------------------- faults

    def kill_at_random(self, incarnation: Incarnation) -> None:
        """Schedule a kill of a decider process at random.

        The kill comes before the last events are written to the log, before the write is confirmed, or later.
        """
        if self.faults.decider_deaths and self.random.random() < self.faults.decider_deaths:
            after_s = self.random.expovariate(self.random.choice([50.0, 1000.0]))
            asyncio.get_running_loop().call_later(after_s, self.kill, incarnation)

    async def _partition_at_random(self) -> None:
        while self.faults.partitions:
            await asyncio.sleep(self.random.expovariate(self.faults.partitions))
            one, other = self.random.sample([LAUNCHER, *self.incarnations], 2)
            seconds = self.random.expovariate(0.5)
            self._record(f"{one} and {other} are disconnected for {seconds:.1f} s")
            self.network.partition(one, other, seconds)

    async def _kill_all_at_random(self) -> None:
        while self.faults.disasters:
            await asyncio.sleep(self.random.expovariate(self.faults.disasters))
            self.kill_all(with_launcher=self.random.random() < 0.5)

    def kill_all(self, *, with_launcher: bool) -> None:
        for incarnation in list(self.incarnations.values()):
            self.kill(incarnation)
        if with_launcher:
            self._record("the launcher is killed")
            self.deaths["launcher"] += 1
            self.network.kill(LAUNCHER)
            self._launcher_killed.set_result(None)

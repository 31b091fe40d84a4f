"""Executors die by kill -9 with many calls in flight; each trajectory ends once, with its results or a cause."""

import asyncio
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop
from structlog.testing import capture_logs

from asterism.actors.launch.child_processes import ChildProcesses, ProcessDied
from asterism.actors.launch.executor_registry import ExecutorRegistry
from asterism.actors.launch.supervisor import Supervisor
from asterism.actors.runtime.decider_loop import DeciderLoop, make_steady_clock
from asterism.bus import messages as msg
from asterism.bus.addresses import parse_process
from asterism.bus.bus import Bus
from asterism.bus.transport.zeromq import open_zmq_bus
from asterism.configs.load import write_resolved
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.machines import SandboxConfig, SupervisionConfig
from asterism.configs.schema.run_config import RunConfig
from asterism.engine.data.task_inputs import write_task_descriptions
from asterism.policies.rollout.rollout import Rollout
from asterism.tasks import MATH_PYTHON
from tests.fakes import ANSWER, TOKENIZER, generated, rules, start_group

pytestmark = pytest.mark.slow

TRAJECTORIES = 300
MIN_IN_FLIGHT = 200  # calls in flight when the executor is killed
BOUND = 100_000


def call(tool: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{tool}", "arguments": {{{arguments}}}}}\n</tool_call>'


def script(trajectory_id: int) -> list[str]:
    """Return the turns of a trajectory. Every tenth trajectory uses a notebook; the others run programs."""
    if trajectory_id % 10:
        return [
            call("python_code_with_standard_io", '"code": "import time; time.sleep(0.3); print(2)", "input": ""'),
            ANSWER,
        ]
    first = call("jupyter_code", f'"code": "x = [{trajectory_id}]"')
    more = call("jupyter_code", '"code": "import time; time.sleep(0.1); x.append(0); print(x)"')
    return [first, more, more, ANSWER]


class Node:
    """A rollout and real executor processes; the other processes of a run are simulated."""

    def __init__(self, path: Path, sandbox: SandboxConfig) -> None:
        folder = RunFolder(path)
        for each in (folder.logs, folder.sockets):
            each.mkdir(parents=True, exist_ok=True)
        write_resolved(RunConfig(name="killed", sandbox=sandbox), folder.config)
        write_task_descriptions(folder, {"": MATH_PYTHON})
        self._sockets = folder.sockets
        self.children = ChildProcesses(folder)
        self.names = tuple(f"executor-{index}" for index in range(sandbox.executors))
        self.launcher = self._bus("launcher")
        self.executors = ExecutorRegistry(
            self.names,
            ("rollout-0",),
            self.launcher,
            lambda name, incarnation: [
                *(sys.executable, "-m", "asterism.actors.process", name),
                *("--run-folder", str(path), "--incarnation", str(incarnation), "--epoch", str(incarnation)),
            ],
        )
        self.supervisor = Supervisor(self.executors.build_programs(), self.children, SupervisionConfig())
        self.rollout = Rollout({"": rules(max_turns=9)})
        self.ended: list[msg.TrajectoryFinished | msg.TrajectoryFailed] = []
        self.head, self.generator = self._bus("head"), self._bus("generator-0")
        self.bus = self._bus("rollout-0")
        self._tasks: list[asyncio.Task[None]] = []

    def _bus(self, name: str) -> Bus:
        return open_zmq_bus(name, self._sockets, BOUND)

    def start(self) -> None:
        loop = DeciderLoop(self.bus, None, {"rollout-0": self.rollout}, {}, make_steady_clock())
        works = (
            loop.run(),
            self._run_launcher(),
            self._serve(self.head, self._decide),
            self._serve(self.generator, self._generate),
        )
        self._tasks = [asyncio.create_task(work) for work in works]
        self.supervisor.start()

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            for task in self._tasks:
                if task.done():
                    task.result()
            await asyncio.sleep(0.005)  # wait for other processes

    async def kill(self, name: str) -> None:
        """Kill an executor and wait until the rollout has received ExecutorLeft."""
        address = next(each for each in self.rollout.placement.loads if each.startswith(f"{name}/"))
        await self.children.kill(name)
        await self.wait_until(lambda: address not in self.rollout.placement.loads)

    async def stop(self) -> None:
        await self.supervisor.stop()
        for name in self.names:
            await self.launcher.send(name, msg.Shutdown())
            if not await self.children.wait_for_exit(name, 5):
                await self.children.kill(name)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for bus in (self.bus, self.head, self.generator, self.launcher):
            await bus.close()

    async def _run_launcher(self) -> None:
        while True:
            match (await self.launcher.receive()).message:
                case msg.ExecutorJoined() as event:
                    await self.executors.on_joined(event)
                case msg.ExecutorHealthy(executor=executor):
                    self.supervisor.mark_healthy(parse_process(executor))
                case _:
                    pass

    async def _serve(self, bus: Bus, answer: Callable[[msg.Envelope], msg.AnyMessage | None]) -> None:
        while True:
            envelope = await bus.receive()
            if (message := answer(envelope)) is not None:
                await bus.send("rollout-0", message)

    def _decide(self, envelope: msg.Envelope) -> msg.AnyMessage | None:
        match envelope.message:
            case msg.LeaseRequested() as request:
                tokens = request.tokens + request.max_new_tokens
                return msg.LeaseGranted(request.trajectory_id, "generator-0", tokens, request.lease, 0.0, "room")
            case msg.TrajectoryFinished() | msg.TrajectoryFailed() as end:
                self.ended.append(end)
            case _:
                pass
        return None

    def _generate(self, envelope: msg.Envelope) -> msg.AnyMessage | None:
        match envelope.message:
            case msg.TurnRequested(trajectory_id=trajectory_id, turn=turn, lease=lease):
                return generated(trajectory_id, turn, script(trajectory_id)[turn], lease=lease)
            case _:
                return None

    @property
    def open_calls(self) -> int:
        return sum(load.open_calls for load in self.rollout.placement.loads.values())


def decode_texts(ended: list[msg.TrajectoryFinished | msg.TrajectoryFailed]) -> dict[int, str]:
    return {
        end.trajectory_id: TOKENIZER.decode(msg.bytes_to_ids(end.record.token_ids))
        for end in ended
        if isinstance(end, msg.TrajectoryFinished)
    }


@pytest.mark.parametrize("executors", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_every_call_in_flight_is_answered_once_by_another_incarnation(tmp_path: Path, executors: int) -> None:
    async def scenario() -> None:
        node = Node(tmp_path / "killed", SandboxConfig(backend="process", executors=executors))
        node.start()
        try:
            await node.wait_until(lambda: len(node.rollout.placement.loads) == executors)
            await node.bus.send("rollout-0", start_group(TRAJECTORIES, 0))
            await node.wait_until(lambda: node.open_calls >= MIN_IN_FLIGHT and len(node.ended) >= 1)
            in_flight = node.open_calls
            await node.kill("executor-0")
            await node.wait_until(lambda: len(node.ended) == TRAJECTORIES)
            assert in_flight >= MIN_IN_FLIGHT
        finally:
            await node.stop()
        assert not node.bus.waiting
        assert Counter(end.trajectory_id for end in node.ended) == Counter(range(TRAJECTORIES))
        assert [end for end in node.ended if isinstance(end, msg.TrajectoryFailed)] == []
        for trajectory_id, text in decode_texts(node.ended).items():
            outputs = re.findall(r"stdout:\n(.*)\n", text)
            expected = [f"[{trajectory_id}, 0]", f"[{trajectory_id}, 0, 0]"]
            assert outputs == (["2"] if trajectory_id % 10 else expected)

    uvloop.run(scenario())


def test_calls_that_are_lost_twice_fail_their_trajectories_and_the_others_finish(tmp_path: Path) -> None:
    async def scenario() -> None:
        node = Node(tmp_path / "killed", SandboxConfig(backend="process"))
        node.start()
        try:
            await node.wait_until(lambda: len(node.rollout.placement.loads) == 1)
            await node.bus.send("rollout-0", start_group(TRAJECTORIES, 0))
            await node.wait_until(lambda: node.open_calls >= MIN_IN_FLIGHT)
            await node.kill("executor-0")
            await node.wait_until(lambda: node.open_calls >= MIN_IN_FLIGHT)  # resent calls are in flight again
            await node.kill("executor-0")
            await node.wait_until(lambda: len(node.ended) == TRAJECTORIES)
        finally:
            await node.stop()
        assert Counter(end.trajectory_id for end in node.ended) == Counter(range(TRAJECTORIES))
        lost = Counter(end.cause for end in node.ended if isinstance(end, msg.TrajectoryFailed))
        assert set(lost) == {"executor left: executor-0 was killed by signal 9"}
        assert 0 < lost.total() <= TRAJECTORIES

    uvloop.run(scenario())


def test_an_executor_that_cannot_start_is_not_restarted(tmp_path: Path) -> None:
    async def scenario() -> None:
        node = Node(tmp_path / "failed", SandboxConfig(backend="docker", image="no-such-image:missing"))
        node.start()
        try:
            with pytest.raises(ProcessDied, match="executor-0 ended with exit code 2"):
                await node.supervisor.wait_for_failure()
        finally:
            await node.stop()

    with capture_logs() as logs:
        uvloop.run(scenario())
    assert [entry["name"] for entry in logs if entry["event"] == "process.started"] == ["executor-0"]

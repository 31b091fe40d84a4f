"""The supervisor restarts processes after a pause, notifies rollouts, and ends the run."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import msgspec
import pytest

from asterism.actors.launch.child_processes import ProcessDied
from asterism.actors.launch.executor_registry import ExecutorRegistry
from asterism.actors.launch.supervisor import Program, Supervisor
from asterism.bus.messages import AnyMessage, ExecutorJoined, ExecutorLeft
from asterism.bus.process.exit_reason import ExitReason
from asterism.bus.process.heartbeat import Heartbeat
from asterism.bus.transport.in_process import Hub
from asterism.configs.errors import EXIT_UNUSABLE
from asterism.configs.schema.machines import SupervisionConfig
from tests.simulation.clock import VirtualLoop
from tests.simulation.processes import SimulatedChildren

SETTINGS = SupervisionConfig(backoff_s=1.0)
RESTARTS = SETTINGS.restarts
LONG_S = 200.0  # start-up allowance of "other-long", in seconds


class Node:
    """A rollout, and a supervisor of four processes that send heartbeats: two executors and two others."""

    def __init__(self, folder: Path) -> None:
        hub = Hub()
        self.rollout = hub.join("rollout-0", 100)
        self.children = SimulatedChildren(folder)
        executors = ("executor-0", "executor-1")
        self.executors = ExecutorRegistry(executors, ("rollout-0",), hub.join("launcher", 100), build_argv)
        others = {
            "other-0": Program(partial(build_argv, "other-0")),
            "other-long": Program(partial(build_argv, "other-long"), startup_allowance_s=LONG_S),
        }
        self.printed: list[str] = []
        programs = {**self.executors.build_programs(), **others}
        self.supervisor = Supervisor(programs, self.children, SETTINGS, self.printed.append)
        self.supervisor.start()
        self.failing = asyncio.create_task(self.supervisor.wait_for_failure())
        self._heartbeats = {name: asyncio.create_task(self._send_heartbeats(name)) for name in (*executors, *others)}

    async def _send_heartbeats(self, name: str) -> None:
        while True:
            current = self.count_starts(name)
            for incarnation in (current, current - 1, current + 1):  # the supervisor ignores other incarnations
                self.supervisor.on_heartbeat(Heartbeat(name, incarnation, 0.0, 0, 0, 0))
            await asyncio.sleep(SETTINGS.heartbeat_s)

    def stop_heartbeats(self, name: str) -> None:
        self._heartbeats[name].cancel()

    async def stop(self) -> None:
        await self.supervisor.stop()
        for task in (self.failing, *self._heartbeats.values()):
            task.cancel()

    def count_starts(self, name: str) -> int:
        return len(self.children.list_starts(name))

    async def join(self, address: str) -> None:
        await self.executors.on_joined(ExecutorJoined(address, 1))
        await settle()

    async def die(self, name: str, code: int = -9) -> None:
        self.children.processes[name].end(code)
        await settle()

    async def drain(self) -> list[AnyMessage]:
        return [(await self.rollout.receive()).message for _ in range(self.rollout.waiting)]


def build_argv(name: str, incarnation: int) -> tuple[str, str]:
    return name, str(incarnation)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def suspend(seconds: float) -> None:
    """Advance the clock without running the event loop."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    loop.now += seconds


@pytest.fixture
@asynccontextmanager
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    node = Node(tmp_path)
    await settle()
    try:
        yield node
    finally:
        await node.stop()


async def test_an_executor_is_restarted_after_a_pause_that_doubles_with_each_death(node: Node) -> None:
    for _ in range(3):
        await node.die("executor-0")
        await asyncio.sleep(10)
    starts = [(start.time, start.argv) for start in node.children.list_starts("executor-0")]
    assert starts == [
        (time, ("executor-0", number)) for time, number in zip((0.0, 1.0, 12.0, 24.0), "1234", strict=True)
    ]


@pytest.mark.parametrize("is_noticed", [False, True])
async def test_a_process_that_dies_before_the_supervisor_stops_is_not_restarted(node: Node, is_noticed: bool) -> None:
    node.children.processes["executor-0"].end(-9)
    if is_noticed:
        await settle()
    await asyncio.wait_for(node.stop(), 1.0)
    await asyncio.sleep(100)
    assert node.count_starts("executor-0") == 1


async def test_rollouts_are_notified_only_of_incarnations_that_joined(node: Node) -> None:
    await node.join("executor-0/1")
    await node.die("executor-0")
    await node.join("executor-0/1")  # the message was in flight when the executor died
    await asyncio.sleep(2)
    await node.die("executor-0")  # the executor dies before it joins
    await asyncio.sleep(5)
    await node.join("executor-0/3")
    assert await node.drain() == [
        ExecutorJoined("executor-0/1", 1),
        ExecutorLeft("executor-0/1", "executor-0 was killed by signal 9"),
        ExecutorJoined("executor-0/3", 1),
    ]


async def test_executors_are_restarted_independently(node: Node) -> None:
    await node.join("executor-0/1")
    await node.join("executor-1/1")
    await node.die("executor-1")
    await asyncio.sleep(2)
    assert (node.count_starts("executor-0"), node.count_starts("executor-1")) == (1, 2)
    assert (await node.drain())[2:] == [ExecutorLeft("executor-1/1", "executor-1 was killed by signal 9")]
    assert node.printed == ["executor-1 was killed by signal 9; it restarts as incarnation 2"]


async def test_an_executor_that_fails_too_often_ends_the_run_with_its_output(node: Node, tmp_path: Path) -> None:
    (tmp_path / "executor-0.out").write_text("no memory\n")
    for incarnation in range(1, RESTARTS + 2):
        assert not node.failing.done()
        await node.join(f"executor-0/{incarnation}")
        await node.die("executor-0")
        await asyncio.sleep(100)
    with pytest.raises(ProcessDied, match=r"executor-0 ended 6 times in a row, the last time with exit code -9"):
        await node.failing
    assert isinstance((await node.drain())[-1], ExecutorLeft)
    assert node.count_starts("executor-0") == RESTARTS + 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reasons", "num_starts"),
    [
        ([ExitReason("ValueError: lr", "exception")], 2),
        ([ExitReason("ValueError: lr", "exception"), ExitReason("ValueError: beta", "exception")], RESTARTS + 1),
        ([ExitReason("ConnectionError: refused", "outage")], RESTARTS + 1),
        ([None], RESTARTS + 1),
    ],
)
async def test_two_failures_with_the_same_exception_end_the_run(
    node: Node, tmp_path: Path, reasons: list[ExitReason | None], num_starts: int
) -> None:
    for number in range(RESTARTS + 2):
        if not node.failing.done():
            (tmp_path / "executor-0.exit").write_bytes(msgspec.json.encode(reasons[number % len(reasons)]))
            await node.die("executor-0", 1)
            await asyncio.sleep(100)
    with pytest.raises(ProcessDied, match=r"executor-0 ended (twice|6 times) in a row.*with exit code 1"):
        await node.failing
    assert node.count_starts("executor-0") == num_starts
    cause = "" if reasons[0] is None else f" ({reasons[0].text})"
    assert node.printed[0] == f"executor-0 ended with exit code 1{cause}; it restarts as incarnation 2"


@pytest.mark.slow
async def test_a_result_resets_the_failures_of_an_executor(node: Node) -> None:
    for incarnation in range(1, 3 * RESTARTS):
        if incarnation % RESTARTS == 0:
            node.supervisor.mark_healthy("executor-0")
        await node.die("executor-0")
        await asyncio.sleep(100)
    assert not node.failing.done()


@pytest.mark.parametrize(("name", "num_deaths"), [("executor-0", 0), ("other-0", 0), ("other-0", 1)])
async def test_unusable_input_ends_the_run_immediately(node: Node, tmp_path: Path, name: str, num_deaths: int) -> None:
    (tmp_path / f"{name}.out").write_text("there is no engine\n")
    for _ in range(num_deaths):
        await node.die(name)
        await asyncio.sleep(10)
    await node.die(name, EXIT_UNUSABLE)
    with pytest.raises(ProcessDied, match=rf"(?s){name} ended with exit code 2.*there is no engine"):
        await node.failing


async def test_an_executor_that_joined_once_is_restarted_even_if_it_exits_as_unusable(node: Node) -> None:
    await node.join("executor-0/1")
    await node.die("executor-0")
    await asyncio.sleep(10)
    await node.die("executor-0", EXIT_UNUSABLE)
    await asyncio.sleep(10)
    assert node.count_starts("executor-0") == 3


@pytest.mark.parametrize("suspended_s", [0.0, 100.0])
async def test_a_process_without_heartbeats_is_killed_and_restarted(node: Node, suspended_s: float) -> None:
    """The supervisor does not count the time in which the launcher itself was suspended."""
    await asyncio.sleep(100)
    assert node.count_starts("other-0") == 1
    node.stop_heartbeats("other-0")
    suspend(suspended_s)
    await asyncio.sleep(SETTINGS.heartbeat_timeout_s - 2)
    assert node.count_starts("other-0") == 1
    await asyncio.sleep(5)
    assert node.count_starts("other-0") == 2


@pytest.mark.slow
async def test_a_hang_is_printed_with_its_cause_and_counts_as_a_failure(node: Node) -> None:
    node.stop_heartbeats("other-0")
    with pytest.raises(
        ProcessDied, match=r"other-0 ended 6 times in a row, the last time \(other-0: no heartbeat for 30"
    ):
        await node.failing
    assert node.count_starts("other-0") == RESTARTS + 1
    hang = r"other-0 was killed by signal 9 \(other-0: no heartbeat for \d+\.\d s\); it restarts as incarnation \d"
    assert len(node.printed) == RESTARTS
    assert all(re.fullmatch(hang, line) for line in node.printed)


@pytest.mark.parametrize("suspended_s", [0.0, SETTINGS.first_heartbeat_timeout_s])
async def test_a_starting_process_has_a_longer_heartbeat_timeout(node: Node, suspended_s: float) -> None:
    node.stop_heartbeats("other-0")
    await node.die("other-0")
    await asyncio.sleep(10)
    suspend(suspended_s)
    await asyncio.sleep(SETTINGS.first_heartbeat_timeout_s - 20)
    assert node.count_starts("other-0") == 2
    await asyncio.sleep(40)
    assert node.count_starts("other-0") == 3


@pytest.mark.slow
@pytest.mark.parametrize(("name", "startup_s", "short_s"), [("other-0", 0.0, 40.0), ("other-long", LONG_S, LONG_S)])
async def test_a_process_that_runs_long_enough_after_its_start_up_resets_its_failures(
    node: Node, name: str, startup_s: float, short_s: float
) -> None:
    for _ in range(RESTARTS + 1):
        await node.die(name)
        await asyncio.sleep(startup_s + SETTINGS.failure_reset_s + 2)
    assert not node.failing.done()
    for _ in range(RESTARTS + 1):
        await node.die(name)
        await asyncio.sleep(short_s)
    with pytest.raises(ProcessDied, match=f"{name} ended 6 times in a row"):
        await node.failing

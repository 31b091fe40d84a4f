"""Restarts of processes, mainly executors: their timing, the notices to rollouts, and the end of the run. Virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest

from actors.launch.child_processes import ChildProcess, ChildProcesses, ProcessDied
from actors.launch.executor_registry import ExecutorRegistry
from actors.launch.supervisor import Program, Supervisor
from bus.bus import Bus
from bus.messages import AnyMessage, ExecutorJoined, ExecutorLeft
from bus.process.heartbeat import Heartbeat
from bus.transport.in_process import Hub
from configs.errors import EXIT_UNUSABLE
from configs.run_folder import RunFolder
from configs.schema import SupervisionConfig
from tests.simulation.clock import VirtualLoop, run_virtually
from tests.simulation.processes import SimulatedProcess

SETTINGS = SupervisionConfig(backoff_s=1.0)
RESTARTS = SETTINGS.restarts
LONG_S = 500.0  # start-up allowance of "other-long"


class SimulatedChildren(ChildProcesses):
    """Records time, name and incarnation of each process instead of starting it."""

    def __init__(self, outputs: Path) -> None:
        super().__init__(RunFolder(outputs))
        self._outputs = outputs
        self.started: list[tuple[float, str]] = []
        self.processes: dict[str, SimulatedProcess] = {}

    async def spawn(self, name: str, argv: Sequence[str], environment: object) -> ChildProcess:
        self.started.append((asyncio.get_running_loop().time(), " ".join(argv)))
        self.processes[name] = SimulatedProcess()
        return ChildProcess(name, self.processes[name], self._outputs / f"{name}.out")  # pyright: ignore

    async def kill(self, name: str) -> None:
        self.processes[name].end(-9)


class Node:
    def __init__(self, folder: Path, *names: str) -> None:
        hub = Hub()
        self.rollout = hub.join("rollout-0", 100)
        self.children = SimulatedChildren(folder)
        bus: Bus = hub.join("launcher", 100)
        self.executors = ExecutorRegistry(
            [name for name in names if name.startswith("executor")],
            ("rollout-0",),
            bus,
            lambda name, incarnation: (name, str(incarnation)),
        )
        others = {
            name: Program(
                lambda incarnation, name=name: (name, str(incarnation)),
                startup_allowance_s=LONG_S if "long" in name else 0.0,
            )
            for name in names
            if name.startswith("other")
        }
        self.supervisor = Supervisor({**self.executors.build_programs(), **others}, self.children, SETTINGS)
        self.supervisor.start()
        self._heartbeats = {name: asyncio.create_task(self._send_heartbeats(name)) for name in names}

    async def _send_heartbeats(self, name: str) -> None:
        while True:
            for incarnation in range(1, 20):
                self.supervisor.on_heartbeat(
                    Heartbeat(name, incarnation, 0.0, 0, 0, 0)
                )  # only the present incarnation counts
            await asyncio.sleep(1.0)

    def stop_heartbeats(self, name: str) -> None:
        self._heartbeats[name].cancel()

    async def stop(self) -> None:
        await self.supervisor.stop()
        for task in self._heartbeats.values():
            task.cancel()

    async def join(self, address: str) -> None:
        await self.executors.on_joined(ExecutorJoined(address, 1))
        await settle()

    async def die(self, name: str, code: int = -9) -> None:
        self.children.processes[name].end(code)
        await settle()

    def drain(self) -> list[AnyMessage]:
        messages: list[AnyMessage] = []
        while self.rollout.waiting:
            messages.append(run_without_waiting(self.rollout.receive).message)
        return messages


def run_without_waiting(receive: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """The result of a coroutine that does not wait."""
    try:
        receive().send(None)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("it waits")


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def play(folder: Path, scenario: Callable[[Node], Coroutine[Any, Any, None]], *names: str) -> None:
    async def run() -> None:
        node = Node(folder, *(names or ("executor-0",)))
        await settle()
        try:
            await scenario(node)
        finally:
            await node.stop()

    run_virtually(run())


def test_an_executor_that_dies_is_restarted_after_a_pause_that_doubles(tmp_path: Path) -> None:
    async def scenario(node: Node) -> None:
        for _ in range(3):
            await node.die("executor-0")
            await asyncio.sleep(10)
        assert node.children.started == [
            (0.0, "executor-0 1"),
            (1.0, "executor-0 2"),
            (12.0, "executor-0 3"),
            (24.0, "executor-0 4"),
        ]

    play(tmp_path, scenario)


def test_a_process_that_dies_during_stop_is_not_restarted(tmp_path: Path) -> None:
    async def scenario(node: Node) -> None:
        node.children.processes["executor-0"].end(-9)
        await asyncio.wait_for(node.stop(), 1.0)
        await asyncio.sleep(10)
        assert len(node.children.started) == 1

    play(tmp_path, scenario)


def test_rollouts_are_notified_only_of_incarnations_that_joined(tmp_path: Path) -> None:
    async def scenario(node: Node) -> None:
        await node.join("executor-0/1")
        await node.die("executor-0")
        await node.join("executor-0/1")  # in flight when it died
        await asyncio.sleep(2)
        await node.die("executor-0")  # before it joined
        await asyncio.sleep(5)
        await node.join("executor-0/3")
        assert node.drain() == [
            ExecutorJoined("executor-0/1", 1),
            ExecutorLeft("executor-0/1", "executor-0 ended with exit code -9"),
            ExecutorJoined("executor-0/3", 1),
        ]

    play(tmp_path, scenario)


def test_executors_are_restarted_independently(tmp_path: Path) -> None:
    async def scenario(node: Node) -> None:
        await node.join("executor-0/1")
        await node.join("executor-1/1")
        await node.die("executor-1")
        await asyncio.sleep(2)
        assert [argv for _, argv in node.children.started] == ["executor-0 1", "executor-1 1", "executor-1 2"]
        assert node.drain()[2:] == [ExecutorLeft("executor-1/1", "executor-1 ended with exit code -9")]

    play(tmp_path, scenario, "executor-0", "executor-1")


def test_an_executor_that_fails_too_often_ends_the_run_with_its_output(tmp_path: Path) -> None:
    (tmp_path / "executor-0.out").write_text("no memory\n")

    async def scenario(node: Node) -> None:
        failing = asyncio.create_task(node.supervisor.wait_for_failure())
        for incarnation in range(1, RESTARTS + 2):
            assert not failing.done()
            await node.join(f"executor-0/{incarnation}")
            await node.die("executor-0")
            await asyncio.sleep(100)
        with pytest.raises(ProcessDied, match=r"executor-0 ended 6 times in a row, the last time with exit code -9"):
            await failing
        assert isinstance(node.drain()[-1], ExecutorLeft)
        assert len(node.children.started) == RESTARTS + 1

    play(tmp_path, scenario)


def test_a_result_resets_the_failures_of_an_executor(tmp_path: Path) -> None:
    async def scenario(node: Node) -> None:
        failing = asyncio.create_task(node.supervisor.wait_for_failure())
        for incarnation in range(1, 3 * RESTARTS):
            if incarnation % RESTARTS == 0:
                node.supervisor.mark_healthy("executor-0")
            await node.die("executor-0")
            await asyncio.sleep(100)
        assert not failing.done()
        failing.cancel()

    play(tmp_path, scenario)


def test_a_sandbox_that_cannot_start_ends_the_run_immediately(tmp_path: Path) -> None:
    """Unusable input is fatal only before the executor has joined once."""
    (tmp_path / "executor-0.out").write_text("there is no engine\n")

    async def first(node: Node) -> None:
        failing = asyncio.create_task(node.supervisor.wait_for_failure())
        await node.die("executor-0", EXIT_UNUSABLE)
        with pytest.raises(ProcessDied, match=r"(?s)executor-0 ended with exit code 2.*there is no engine"):
            await failing

    async def second(node: Node) -> None:
        await node.join("executor-0/1")
        await node.die("executor-0")
        await asyncio.sleep(10)
        await node.die("executor-0", EXIT_UNUSABLE)
        await asyncio.sleep(10)
        assert len(node.children.started) == 3

    play(tmp_path, first)
    play(tmp_path, second)


def test_no_process_is_restarted_after_stop(tmp_path: Path) -> None:
    async def scenario(node: Node) -> None:
        await node.die("executor-0")
        await node.stop()
        await asyncio.sleep(100)
        assert len(node.children.started) == 1

    play(tmp_path, scenario)


def test_a_process_without_heartbeats_is_killed_and_restarted(tmp_path: Path) -> None:
    async def scenario(node: Node) -> None:
        await asyncio.sleep(100)
        assert len(node.children.started) == 1
        node.stop_heartbeats("other-0")
        await asyncio.sleep(SETTINGS.heartbeat_timeout_s - 2)
        assert len(node.children.started) == 1
        await asyncio.sleep(5)
        assert len(node.children.started) == 2

    play(tmp_path, scenario, "other-0")


def test_a_starting_process_has_a_longer_heartbeat_timeout(tmp_path: Path) -> None:
    async def scenario(node: Node) -> None:
        node.stop_heartbeats("other-0")
        await node.die("other-0")
        await asyncio.sleep(SETTINGS.first_heartbeat_timeout_s - 10)
        assert len(node.children.started) == 2
        await asyncio.sleep(20)
        assert len(node.children.started) == 3

    play(tmp_path, scenario, "other-0")


def test_a_launcher_that_was_suspended_restarts_the_heartbeat_timeout(tmp_path: Path) -> None:
    async def scenario(node: Node) -> None:
        await asyncio.sleep(10)
        node.stop_heartbeats("other-0")
        suspend(100)
        await asyncio.sleep(SETTINGS.heartbeat_timeout_s - 2)
        assert len(node.children.started) == 1
        await asyncio.sleep(5)  # it sends no heartbeats after the suspension either
        assert len(node.children.started) == 2

    play(tmp_path, scenario, "other-0")


def test_a_launcher_that_was_suspended_restarts_the_first_heartbeat_timeout(tmp_path: Path) -> None:
    async def scenario(node: Node) -> None:
        node.stop_heartbeats("other-0")
        await node.die("other-0")
        await asyncio.sleep(10)
        suspend(SETTINGS.first_heartbeat_timeout_s)
        await asyncio.sleep(SETTINGS.first_heartbeat_timeout_s - 10)
        assert len(node.children.started) == 2
        await asyncio.sleep(20)
        assert len(node.children.started) == 3

    play(tmp_path, scenario, "other-0")


def suspend(seconds: float) -> None:
    """Advance the clock without running the event loop."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    loop.now += seconds


def test_a_process_that_runs_long_enough_resets_its_failures(tmp_path: Path) -> None:
    async def scenario(node: Node) -> None:
        failing = asyncio.create_task(node.supervisor.wait_for_failure())
        for _ in range(3 * RESTARTS):
            await node.die("other-0")
            await asyncio.sleep(SETTINGS.failure_reset_s + 2)
        assert not failing.done()
        for _ in range(RESTARTS + 1):
            await node.die("other-0")
            await asyncio.sleep(40)
        with pytest.raises(ProcessDied, match="other-0 ended 6 times in a row"):
            await failing

    play(tmp_path, scenario, "other-0")


def test_start_up_time_does_not_reset_the_failures(tmp_path: Path) -> None:
    async def scenario(node: Node) -> None:
        failing = asyncio.create_task(node.supervisor.wait_for_failure())
        for _ in range(2 * RESTARTS):
            await node.die("other-long")
            await asyncio.sleep(LONG_S + SETTINGS.failure_reset_s + 2)
        assert not failing.done()
        for _ in range(RESTARTS + 1):
            await node.die("other-long")
            await asyncio.sleep(LONG_S)
        with pytest.raises(ProcessDied, match="other-long ended 6 times in a row"):
            await failing

    play(tmp_path, scenario, "other-long")


def test_unusable_input_ends_the_run_also_in_a_later_incarnation(tmp_path: Path) -> None:
    (tmp_path / "other-0.out").write_text("the disk is full\n")

    async def scenario(node: Node) -> None:
        failing = asyncio.create_task(node.supervisor.wait_for_failure())
        await node.die("other-0")
        await asyncio.sleep(10)
        await node.die("other-0", EXIT_UNUSABLE)
        with pytest.raises(ProcessDied, match=r"(?s)other-0 ended with exit code 2.*the disk is full"):
            await failing

    play(tmp_path, scenario, "other-0")


@pytest.mark.slow
def test_a_child_with_a_cancelled_start_can_still_be_killed(tmp_path: Path) -> None:
    async def scenario() -> None:
        folder = RunFolder(tmp_path)
        folder.logs.mkdir()
        children = ChildProcesses(folder)
        starting = asyncio.create_task(children.spawn("sleeper", ["sleep", "60"], {}))
        await asyncio.sleep(0)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert children.names == ["sleeper"]
        await children.kill("sleeper")
        assert await children.wait_for_exit("sleeper", 5)

    asyncio.run(scenario())

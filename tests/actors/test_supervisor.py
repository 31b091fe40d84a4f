"""Processes that are started again, executors above all: when, who hears of it, and when the run gives up. Under a virtual
clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest

from actors.children import Child, Children, ProcessDied
from actors.executors import Executors
from actors.supervisor import Program, Supervisor
from bus.heartbeat import Heartbeat
from bus.in_process import Hub
from bus.messages import AnyMessage, ExecutorJoined, ExecutorLeft
from bus.transport import Bus
from configs.errors import UNUSABLE
from configs.run_folder import RunFolder
from configs.schema import Supervision
from tests.simulation.clock import VirtualLoop, run_virtually
from tests.simulation.processes import SimulatedProcess

SETTINGS = Supervision(backoff_s=1.0)
RESTARTS = SETTINGS.restarts
LONG_S = 500.0  # until an "other-long" works


class Nursery(Children):
    """Starts nothing, and keeps when what was started, by name and life."""

    def __init__(self, outputs: Path) -> None:
        super().__init__(RunFolder(outputs))
        self._outputs = outputs
        self.started: list[tuple[float, str]] = []
        self.processes: dict[str, SimulatedProcess] = {}

    async def spawn(self, name: str, argv: Sequence[str], environment: object) -> Child:
        self.started.append((asyncio.get_running_loop().time(), " ".join(argv)))
        self.processes[name] = SimulatedProcess()
        return Child(name, self.processes[name], self._outputs / f"{name}.out")  # pyright: ignore

    async def kill(self, name: str) -> None:
        self.processes[name].end(-9)


class Node:
    def __init__(self, folder: Path, *names: str) -> None:
        hub = Hub()
        self.rollout = hub.join("rollout-0", 100)
        self.children = Nursery(folder)
        bus: Bus = hub.join("launcher", 100)
        self.executors = Executors(
            [name for name in names if name.startswith("executor")],
            ("rollout-0",),
            bus,
            lambda name, life: (name, str(life)),
        )
        others = {
            name: Program(lambda life, name=name: (name, str(life)), starts_within_s=LONG_S if "long" in name else 0.0)
            for name in names
            if name.startswith("other")
        }
        self.supervisor = Supervisor({**self.executors.programs(), **others}, self.children, SETTINGS)
        self.supervisor.start()
        self._beating = {name: asyncio.create_task(self._beat(name)) for name in names}

    async def _beat(self, name: str) -> None:
        while True:
            for life in range(1, 20):
                self.supervisor.heard(Heartbeat(name, life, 0.0, 0, 0, 0))  # only the present one counts
            await asyncio.sleep(1.0)

    def fall_silent(self, name: str) -> None:
        self._beating[name].cancel()

    async def stop(self) -> None:
        await self.supervisor.stop()
        for beating in self._beating.values():
            beating.cancel()

    async def join(self, address: str) -> None:
        """And be heard of."""
        await self.executors.joined(ExecutorJoined(address, 1))
        await settle()

    async def die(self, name: str, code: int = -9) -> None:
        """And be noticed."""
        self.children.processes[name].end(code)
        await settle()

    def heard(self) -> list[AnyMessage]:
        messages: list[AnyMessage] = []
        while self.rollout.waiting:
            messages.append(run_now(self.rollout.receive).message)
        return messages


def run_now(receive: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """What a coroutine returns that has no need to wait."""
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


def test_an_executor_that_dies_is_started_again_after_a_pause_that_doubles(tmp_path: Path) -> None:
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


def test_one_that_dies_at_the_moment_of_stopping_is_not_started_again(tmp_path: Path) -> None:
    async def scenario(node: Node) -> None:
        node.children.processes["executor-0"].end(-9)
        await asyncio.wait_for(node.stop(), 1.0)
        await asyncio.sleep(10)
        assert len(node.children.started) == 1

    play(tmp_path, scenario)


def test_rollouts_hear_of_those_that_joined_and_of_no_other_life(tmp_path: Path) -> None:
    async def scenario(node: Node) -> None:
        await node.join("executor-0/1")
        await node.die("executor-0")
        await node.join("executor-0/1")  # its word was still on the way when it died
        await asyncio.sleep(2)
        await node.die("executor-0")  # before it joined
        await asyncio.sleep(5)
        await node.join("executor-0/3")
        assert node.heard() == [
            ExecutorJoined("executor-0/1", 1),
            ExecutorLeft("executor-0/1", "executor-0 ended with exit code -9"),
            ExecutorJoined("executor-0/3", 1),
        ]

    play(tmp_path, scenario)


def test_executors_come_and_go_by_themselves(tmp_path: Path) -> None:
    async def scenario(node: Node) -> None:
        await node.join("executor-0/1")
        await node.join("executor-1/1")
        await node.die("executor-1")
        await asyncio.sleep(2)
        assert [argv for _, argv in node.children.started] == ["executor-0 1", "executor-1 1", "executor-1 2"]
        assert node.heard()[2:] == [ExecutorLeft("executor-1/1", "executor-1 ended with exit code -9")]

    play(tmp_path, scenario, "executor-0", "executor-1")


def test_one_that_dies_again_and_again_without_a_result_ends_the_run_with_its_last_words(tmp_path: Path) -> None:
    (tmp_path / "executor-0.out").write_text("no memory\n")

    async def scenario(node: Node) -> None:
        giving_up = asyncio.create_task(node.supervisor.until_given_up())
        for life in range(1, RESTARTS + 2):
            assert not giving_up.done()
            await node.join(f"executor-0/{life}")
            await node.die("executor-0")
            await asyncio.sleep(100)
        with pytest.raises(ProcessDied, match=r"executor-0 ended 6 times in a row, at last with exit code -9"):
            await giving_up
        assert isinstance(node.heard()[-1], ExecutorLeft)
        assert len(node.children.started) == RESTARTS + 1

    play(tmp_path, scenario)


def test_a_result_forgives_the_deaths_before_it(tmp_path: Path) -> None:
    async def scenario(node: Node) -> None:
        giving_up = asyncio.create_task(node.supervisor.until_given_up())
        for life in range(1, 3 * RESTARTS):
            if life % RESTARTS == 0:
                node.supervisor.proved("executor-0")
            await node.die("executor-0")
            await asyncio.sleep(100)
        assert not giving_up.done()
        giving_up.cancel()

    play(tmp_path, scenario)


def test_a_sandbox_that_cannot_stand_ends_the_run_at_once(tmp_path: Path) -> None:
    """What the first life lacks, the next ones lack too; one that stood before may stand again."""
    (tmp_path / "executor-0.out").write_text("there is no engine\n")

    async def first(node: Node) -> None:
        giving_up = asyncio.create_task(node.supervisor.until_given_up())
        await node.die("executor-0", UNUSABLE)
        with pytest.raises(ProcessDied, match=r"(?s)executor-0 ended with exit code 2.*there is no engine"):
            await giving_up

    async def second(node: Node) -> None:
        await node.join("executor-0/1")
        await node.die("executor-0")
        await asyncio.sleep(10)
        await node.die("executor-0", UNUSABLE)
        await asyncio.sleep(10)
        assert len(node.children.started) == 3

    play(tmp_path, first)
    play(tmp_path, second)


def test_none_is_started_any_more_once_the_run_ends(tmp_path: Path) -> None:
    async def scenario(node: Node) -> None:
        await node.die("executor-0")
        await node.stop()
        await asyncio.sleep(100)
        assert len(node.children.started) == 1

    play(tmp_path, scenario)


def test_a_process_that_falls_silent_is_killed_and_started_again(tmp_path: Path) -> None:
    async def scenario(node: Node) -> None:
        await asyncio.sleep(100)
        assert len(node.children.started) == 1
        node.fall_silent("other-0")
        await asyncio.sleep(SETTINGS.silent_s - 2)
        assert len(node.children.started) == 1
        await asyncio.sleep(5)
        assert len(node.children.started) == 2

    play(tmp_path, scenario, "other-0")


def test_a_process_has_its_time_to_start_before_it_counts_as_silent(tmp_path: Path) -> None:
    async def scenario(node: Node) -> None:
        node.fall_silent("other-0")
        await node.die("other-0")
        await asyncio.sleep(SETTINGS.start_s - 10)
        assert len(node.children.started) == 2
        await asyncio.sleep(20)
        assert len(node.children.started) == 3

    play(tmp_path, scenario, "other-0")


def test_a_launcher_that_was_held_up_itself_kills_nobody_for_what_it_could_not_hear(tmp_path: Path) -> None:
    async def scenario(node: Node) -> None:
        await asyncio.sleep(10)
        node.fall_silent("other-0")
        pass_by(100)
        await asyncio.sleep(SETTINGS.silent_s - 2)
        assert len(node.children.started) == 1
        await asyncio.sleep(5)  # but it is silent, and not only unheard
        assert len(node.children.started) == 2

    play(tmp_path, scenario, "other-0")


def test_nor_one_that_had_not_been_heard_of_yet(tmp_path: Path) -> None:
    async def scenario(node: Node) -> None:
        node.fall_silent("other-0")
        await node.die("other-0")
        await asyncio.sleep(10)
        pass_by(SETTINGS.start_s)
        await asyncio.sleep(SETTINGS.start_s - 10)
        assert len(node.children.started) == 2
        await asyncio.sleep(20)
        assert len(node.children.started) == 3

    play(tmp_path, scenario, "other-0")


def pass_by(seconds: float) -> None:
    """The clock goes on, and the event loop has not come round."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    loop.now += seconds


def test_a_process_that_has_lived_for_a_while_is_forgiven_its_deaths(tmp_path: Path) -> None:
    async def scenario(node: Node) -> None:
        giving_up = asyncio.create_task(node.supervisor.until_given_up())
        for _ in range(3 * RESTARTS):
            await node.die("other-0")
            await asyncio.sleep(SETTINGS.settled_s + 2)
        assert not giving_up.done()
        for _ in range(RESTARTS + 1):
            await node.die("other-0")
            await asyncio.sleep(40)
        with pytest.raises(ProcessDied, match="other-0 ended 6 times in a row"):
            await giving_up

    play(tmp_path, scenario, "other-0")


def test_one_that_takes_long_until_it_works_is_not_forgiven_for_that_time(tmp_path: Path) -> None:
    async def scenario(node: Node) -> None:
        giving_up = asyncio.create_task(node.supervisor.until_given_up())
        for _ in range(2 * RESTARTS):
            await node.die("other-long")
            await asyncio.sleep(LONG_S + SETTINGS.settled_s + 2)
        assert not giving_up.done()
        for _ in range(RESTARTS + 1):
            await node.die("other-long")
            await asyncio.sleep(LONG_S)
        with pytest.raises(ProcessDied, match="other-long ended 6 times in a row"):
            await giving_up

    play(tmp_path, scenario, "other-long")


def test_what_a_process_cannot_use_another_life_of_it_cannot_use_either(tmp_path: Path) -> None:
    (tmp_path / "other-0.out").write_text("the disk is full\n")

    async def scenario(node: Node) -> None:
        giving_up = asyncio.create_task(node.supervisor.until_given_up())
        await node.die("other-0")
        await asyncio.sleep(10)
        await node.die("other-0", UNUSABLE)
        with pytest.raises(ProcessDied, match=r"(?s)other-0 ended with exit code 2.*the disk is full"):
            await giving_up

    play(tmp_path, scenario, "other-0")


@pytest.mark.slow
def test_a_child_whose_start_is_cancelled_is_there_to_be_ended(tmp_path: Path) -> None:
    async def scenario() -> None:
        folder = RunFolder(tmp_path)
        folder.logs.mkdir()
        children = Children(folder)
        starting = asyncio.create_task(children.spawn("sleeper", ["sleep", "60"], {}))
        await asyncio.sleep(0)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert children.names == ["sleeper"]
        await children.kill("sleeper")
        assert await children.wait("sleeper", 5)

    asyncio.run(scenario())

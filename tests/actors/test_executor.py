"""An executor runs with a bus and a scripted sandbox."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import NoReturn

import pytest
from structlog.testing import capture_logs

from asterism.actors.executor import Executor
from asterism.bus import messages as msg
from asterism.bus.transport.in_process import Hub
from asterism.sandbox.contract import CodeResult, Grade, Isolation, SandboxFailure

ADDRESS = "executor-0/2"


class ScriptedSandbox:
    """A sandbox that records requests; code and answers are their own duration in seconds, or "break"."""

    def __init__(self) -> None:
        self.running = 0
        self.max_running = 0
        self.requests: list[str] = []
        self.broken = asyncio.Event()
        self.output = ""  # output of each call; if empty, the code

    async def start(self) -> Isolation:
        return Isolation("scripted", (), False, ())

    async def run(self, call: msg.CodeRequested) -> CodeResult:
        await self._work(f"run {call.trajectory_id}", call.code)
        return CodeResult(msg.CodeOk(msg.Output(self.output or call.code)), 0.1)

    async def grade(self, submission: msg.AnswerSubmitted) -> Grade:
        await self._work(f"grade {submission.trajectory_id}", submission.answer)
        return Grade(True, 0.1)

    async def _work(self, request: str, duration: str) -> None:
        self.requests.append(request)
        if duration == "break":
            raise SandboxFailure("broken")
        self.running += 1
        self.max_running = max(self.max_running, self.running)
        try:
            await asyncio.sleep(float(duration))
        except asyncio.CancelledError:
            self.requests.append(f"stopped {request}")
            raise
        finally:
            self.running -= 1

    async def wait_until_broken(self) -> NoReturn:
        await self.broken.wait()
        raise SandboxFailure("no container for 120 s")

    def restore_notebook(self, trajectory_id: int, cells: Sequence[msg.CodeRequested]) -> None:
        self.requests.append(f"restore {trajectory_id}: {len(cells)}")

    async def end_notebook(self, trajectory_id: int) -> None:
        self.requests.append(f"end {trajectory_id}")

    async def close(self) -> None:
        self.requests.append("close")


class Scene:
    """An executor, a rollout and a launcher."""

    def __init__(self, max_calls: int, bound: int, strict: bool) -> None:
        hub = Hub()
        self.sandbox = ScriptedSandbox()
        self.rollout = hub.join("rollout-0", bound)
        self.launcher = hub.join("launcher", bound)
        self.bus = hub.join("executor-0", bound)
        limits = {"slots": 3, "max_calls": max_calls}
        executor = Executor(self.bus, self.sandbox, address=ADDRESS, launcher="launcher", strict=strict, **limits)
        self.work = asyncio.create_task(executor.run())

    async def send(self, *messages: msg.AnyMessage, to: str = ADDRESS) -> None:
        for message in messages:
            await self.rollout.send(to, message)

    async def receive(self, count: int) -> list[msg.AnyMessage]:
        return [(await self.rollout.receive()).message for _ in range(count)]

    async def receive_finished(self, count: int) -> list[int]:
        """Return the trajectories of the finished calls among the next `count` messages."""
        return [message.trajectory_id for message in await self.receive(count) if isinstance(message, msg.CodeFinished)]


@asynccontextmanager
async def open_scene(max_calls: int = 100, bound: int = 1000, strict: bool = False) -> AsyncIterator[Scene]:
    scene = Scene(max_calls, bound, strict)
    yield scene
    await scene.send(msg.Shutdown(), to="executor-0")
    await scene.work


@pytest.fixture
def scene() -> AbstractAsyncContextManager[Scene]:
    return open_scene()


def call(trajectory_id: int, duration: str = "1", number: int = 0) -> msg.CodeRequested:
    return msg.CodeRequested(trajectory_id, number, "python_code_with_standard_io", duration, "")


def answer(trajectory_id: int, duration: str = "1") -> msg.AnswerSubmitted:
    return msg.AnswerSubmitted(trajectory_id, duration, "2")


async def test_an_executor_announces_itself_and_reports_its_first_result_once(scene: Scene) -> None:
    assert (await scene.launcher.receive()).message == msg.ExecutorJoined(ADDRESS, 3)
    await scene.send(call(0, "break"), call(1), call(2))
    await scene.receive(3)
    assert (await scene.launcher.receive()).message == msg.ExecutorHealthy(ADDRESS)
    assert scene.launcher.waiting == 0


async def test_the_isolation_is_recorded_before_the_executor_joins() -> None:
    hub = Hub()
    bus, launcher = hub.join("executor-0", 10), hub.join("launcher", 10)
    recorded: list[tuple[str, int]] = []
    executor = Executor(
        *(bus, ScriptedSandbox()),
        launcher="launcher",
        on_isolated=lambda isolation: recorded.append((isolation.backend, launcher.waiting)),
    )
    running = asyncio.create_task(executor.run())
    assert isinstance((await launcher.receive()).message, msg.ExecutorJoined)
    assert recorded == [("scripted", 0)]
    await launcher.send("executor-0", msg.Shutdown())
    await running


async def test_an_executor_ends_without_answers_when_its_sandbox_breaks_permanently() -> None:
    scene = Scene(100, 1000, False)
    await scene.send(call(0), call(1, "1000"))
    await scene.receive(1)
    scene.sandbox.broken.set()
    with pytest.raises(SandboxFailure, match="no container for 120 s"):
        await scene.work
    assert scene.sandbox.requests[-2:] == ["stopped run 1", "close"]
    assert scene.rollout.waiting == 0  # the launcher sends ExecutorLeft, and the rollout sends the call elsewhere


async def test_every_answer_has_the_address_of_its_executor_and_a_failure_is_not_a_result(scene: Scene) -> None:
    await scene.send(call(0), call(1, "break", 3), answer(2), answer(3, "break"))
    answers = await scene.receive(4)
    assert answers[:2] == [
        msg.CallFailed(1, 3, "sandbox: broken", ADDRESS),
        msg.CallFailed(3, -1, "grader: broken", ADDRESS),
    ]
    assert msg.CodeFinished(0, 0, msg.CodeOk(msg.Output("1")), 0.1, ADDRESS) in answers
    assert msg.AnswerGraded(2, 1.0, 0.1, ADDRESS, {"correct": 1.0}) in answers


@pytest.mark.parametrize(("strict", "output"), [(False, "<f at 0x7f8652565a80>"), (True, "<f at 0x000000000000>")])
async def test_a_strict_executor_scrubs_memory_addresses(strict: bool, output: str) -> None:
    async with open_scene(strict=strict) as scene:
        scene.sandbox.output = "<f at 0x7f8652565a80>"
        await scene.send(call(0))
        assert await scene.receive(1) == [msg.CodeFinished(0, 0, msg.CodeOk(msg.Output(output)), 0.1, ADDRESS)]


async def test_messages_for_an_earlier_incarnation_are_dropped(scene: Scene) -> None:
    await scene.send(call(0), msg.SessionRestored(0, (call(0),)), msg.SessionEnded(0), to="executor-0/1")
    await scene.send(call(1))
    assert await scene.receive_finished(1) == [1]
    assert scene.sandbox.requests == ["run 1"]


async def test_a_notebook_is_restored_before_the_call_that_needs_it(scene: Scene) -> None:
    await scene.send(msg.SessionRestored(0, (call(0), call(0))), call(0))
    await scene.receive(1)
    assert scene.sandbox.requests == ["restore 0: 2", "run 0"]


async def test_the_end_of_a_trajectory_cancels_its_calls_and_gradings_without_answers(scene: Scene) -> None:
    await scene.send(call(0, "50"), call(0, "60", 1), answer(0, "70"), call(1, "80"))
    await asyncio.sleep(1)
    await scene.send(msg.SessionEnded(0))
    assert await scene.receive_finished(1) == [1]
    assert sorted(scene.sandbox.requests) == sorted(
        ["run 0", "run 0", "grade 0", "run 1", "stopped run 0", "stopped run 0", "stopped grade 0", "end 0"]
    )
    await asyncio.sleep(100)
    assert scene.rollout.waiting == 0


async def test_a_call_that_has_just_arrived_is_cancelled_too(scene: Scene) -> None:
    await scene.send(call(0), msg.SessionEnded(0), call(1, "5"))
    assert await scene.receive_finished(1) == [1]
    assert scene.sandbox.requests[-1] == "run 1"
    assert scene.sandbox.running == 0


async def test_a_cancelled_call_frees_capacity_for_waiting_calls() -> None:
    async with open_scene(max_calls=1) as scene:
        await scene.send(call(0, "1000"), call(1))
        await asyncio.sleep(10)
        assert scene.sandbox.requests == ["run 0"]
        await scene.send(msg.SessionEnded(0))
        assert await asyncio.wait_for(scene.receive_finished(1), 5) == [1]


async def test_a_waiting_call_is_cancelled_without_running() -> None:
    async with open_scene(max_calls=2) as scene:
        await scene.send(call(0, "10"), call(1, "10"), call(2, "1"))
        await scene.send(msg.SessionEnded(2))
        await scene.receive(2)
        await asyncio.sleep(50)
        assert scene.rollout.waiting == 0
        assert "run 2" not in scene.sandbox.requests


async def test_beyond_the_bounds_senders_get_back_pressure_and_no_call_is_lost() -> None:
    """At the bounds, 2 calls run, 2 wait for the sandbox, 1 is received but not queued, and 8 are on the bus."""
    async with open_scene(max_calls=2, bound=8) as scene:
        sending = asyncio.create_task(scene.send(*(call(number) for number in range(300))))
        await asyncio.sleep(0.5)
        assert not sending.done()
        assert scene.sandbox.requests == ["run 0", "run 1"]
        assert scene.bus.waiting <= 8
        numbers = await scene.receive_finished(300)
        assert [number // 2 for number in numbers] == [number // 2 for number in range(300)]
        assert scene.sandbox.max_running == 2
        await sending


async def test_two_full_queues_do_not_wait_for_each_other() -> None:
    """A rollout sends all effects of an event before it receives again."""
    async with open_scene(max_calls=2, bound=4) as scene:
        await scene.send(*(call(number) for number in range(100)))
        numbers = await scene.receive_finished(100)
        assert sorted(numbers) == list(range(100))


async def test_the_end_of_a_trajectory_is_received_at_full_capacity() -> None:
    """All slots of the sandbox can have long calls of this trajectory."""
    async with open_scene(max_calls=2) as scene:
        await scene.send(*(call(0, "3600", number) for number in range(3)), msg.SessionEnded(0), call(1))
        assert await asyncio.wait_for(scene.receive_finished(1), 5) == [1]


async def test_shutdown_cancels_the_calls_of_an_executor() -> None:
    async with open_scene(max_calls=4) as scene:
        await scene.send(*(call(number, "3600") for number in range(6)))
        await asyncio.sleep(1)
    assert scene.sandbox.requests[-1] == "close"
    assert scene.sandbox.running == 0


async def test_misdirected_messages_are_logged_and_dropped() -> None:
    with capture_logs() as logged:
        async with open_scene() as scene:
            await scene.rollout.send_frame("executor-0", b"no message")
            await scene.send(msg.ExecutorJoined("executor-1/1", 3), call(1))
            await scene.receive_finished(1)
    errors = [(entry["event"], entry.get("kind")) for entry in logged if entry["log_level"] == "error"]
    assert errors == [("frame.dropped", None), ("message.misdirected", "ExecutorJoined")]

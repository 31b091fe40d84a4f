"""The executor between a bus and a sandbox that does as it is told, under a virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import NoReturn

import pytest
from structlog.testing import capture_logs

from actors.executor import Executor
from bus.in_process import Hub
from bus.messages import (
    AnswerGraded,
    AnswerSubmitted,
    AnyMessage,
    CallFailed,
    CodeFinished,
    CodeOk,
    CodeRequested,
    ExecutorJoined,
    ExecutorProved,
    Output,
    SessionEnded,
    SessionRestored,
    Shutdown,
)
from sandbox.contract import CodeResult, Grade, Isolation, SandboxFailure
from tests.simulation.clock import run_virtually

ADDRESS = "executor-0/2"


class ObedientSandbox:
    """Code is the number of seconds that it takes, or "break"; an answer likewise. Keeps what was asked of it."""

    def __init__(self) -> None:
        self.running = 0
        self.most = 0
        self.told: list[str] = []
        self.broken = asyncio.Event()
        self.says = ""  # what code prints, instead of itself

    async def start(self) -> Isolation:
        return Isolation("obedient", (), False, ())

    async def run(self, call: CodeRequested) -> CodeResult:
        await self._work(f"run {call.trajectory_id}", call.code)
        return CodeResult(CodeOk(Output(self.says or call.code)), 0.1)

    async def grade(self, submission: AnswerSubmitted) -> Grade:
        await self._work(f"grade {submission.trajectory_id}", submission.answer)
        return Grade(True, 0.1)

    async def _work(self, what: str, seconds: str) -> None:
        self.told.append(what)
        if seconds == "break":
            raise SandboxFailure("broken")
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(float(seconds))
        except asyncio.CancelledError:
            self.told.append(f"stopped {what}")
            raise
        finally:
            self.running -= 1

    async def until_broken(self) -> NoReturn:
        await self.broken.wait()
        raise SandboxFailure("no container for 120 s")

    def restore_session(self, trajectory_id: int, cells: Sequence[CodeRequested]) -> None:
        self.told.append(f"restore {trajectory_id}: {len(cells)}")

    async def end_session(self, trajectory_id: int) -> None:
        self.told.append(f"end {trajectory_id}")

    async def close(self) -> None:
        self.told.append("close")


class Place:
    """An executor, and the rollout and the launcher that it speaks to."""

    def __init__(self, max_calls: int, bound: int, strict: bool) -> None:
        hub = Hub()
        self.sandbox = ObedientSandbox()
        self.rollout = hub.join("rollout-0", bound)
        self.launcher = hub.join("launcher", bound)
        self.bus = hub.join("executor-0", bound)
        limits = {"slots": 3, "max_calls": max_calls}
        executor = Executor(self.bus, self.sandbox, address=ADDRESS, launcher="launcher", strict=strict, **limits)
        self.work = asyncio.create_task(executor.run())

    async def ask(self, *messages: AnyMessage, to: str = ADDRESS) -> None:
        for message in messages:
            await self.rollout.send(to, message)

    async def answers(self, count: int) -> list[AnyMessage]:
        return [(await self.rollout.receive()).message for _ in range(count)]


@asynccontextmanager
async def place(max_calls: int = 100, bound: int = 1000, strict: bool = False) -> AsyncIterator[Place]:
    one = Place(max_calls, bound, strict)
    yield one
    await one.ask(Shutdown(), to="executor-0")
    await one.work


def call(trajectory_id: int, seconds: str = "1", number: int = 0) -> CodeRequested:
    return CodeRequested(trajectory_id, number, "python_code_with_standard_io", seconds, "")


def answer(trajectory_id: int, seconds: str = "1") -> AnswerSubmitted:
    return AnswerSubmitted(trajectory_id, seconds, "2")


def test_it_joins_by_itself_and_tells_its_first_result_once() -> None:
    async def scenario() -> None:
        async with place() as one:
            assert (await one.launcher.receive()).message == ExecutorJoined(ADDRESS, 3)
            await one.ask(call(0, "break"), call(1), call(2))
            await one.answers(3)
            assert (await one.launcher.receive()).message == ExecutorProved(ADDRESS)
            assert one.launcher.waiting == 0

    run_virtually(scenario())


def test_it_ends_when_its_sandbox_is_broken_for_good_and_answers_nobody() -> None:
    async def scenario() -> None:
        one = Place(100, 1000, False)
        await one.ask(call(0), call(1, "1000"))
        await one.answers(1)
        one.sandbox.broken.set()
        with pytest.raises(SandboxFailure, match="no container for 120 s"):
            await one.work
        assert one.sandbox.told[-2:] == ["stopped run 1", "close"]
        assert one.rollout.waiting == 0  # the launcher says that it has left, and the call is asked for elsewhere

    run_virtually(scenario())


def test_every_answer_says_who_gave_it_and_a_failure_is_no_result() -> None:
    async def scenario() -> None:
        async with place() as one:
            await one.ask(call(0), call(1, "break", 3), answer(2), answer(3, "break"))
            answers = await one.answers(4)
            assert answers[:2] == [
                CallFailed(1, 3, "sandbox: broken", ADDRESS),
                CallFailed(3, -1, "grader: broken", ADDRESS),
            ]
            assert CodeFinished(0, 0, CodeOk(Output("1")), 0.1, ADDRESS) in answers
            assert AnswerGraded(2, True, 0.1, ADDRESS) in answers

    run_virtually(scenario())


@pytest.mark.parametrize(("strict", "seen"), [(False, "<f at 0x7f8652565a80>"), (True, "<f at 0x000000000000>")])
def test_a_strict_one_answers_without_memory_addresses(strict: bool, seen: str) -> None:
    async def scenario() -> None:
        async with place(strict=strict) as one:
            one.sandbox.says = "<f at 0x7f8652565a80>"
            await one.ask(call(0))
            assert await one.answers(1) == [CodeFinished(0, 0, CodeOk(Output(seen)), 0.1, ADDRESS)]

    run_virtually(scenario())


def test_what_was_meant_for_a_former_life_is_not_done() -> None:
    async def scenario() -> None:
        async with place() as one:
            await one.ask(call(0), SessionRestored(0, (call(0),)), SessionEnded(0), to="executor-0/1")
            await one.ask(call(1))
            (finished,) = await one.answers(1)
            assert isinstance(finished, CodeFinished)
            assert finished.trajectory_id == 1
            assert one.sandbox.told == ["run 1"]

    run_virtually(scenario())


def test_a_notebook_is_there_before_the_call_that_needs_it() -> None:
    async def scenario() -> None:
        async with place() as one:
            await one.ask(SessionRestored(0, (call(0), call(0))), call(0))
            await one.answers(1)
            assert one.sandbox.told == ["restore 0: 2", "run 0"]

    run_virtually(scenario())


def test_the_end_of_a_trajectory_stops_its_calls_and_gradings_and_nothing_is_answered_to_them() -> None:
    async def scenario() -> None:
        async with place() as one:
            await one.ask(call(0, "50"), call(0, "60", 1), answer(0, "70"), call(1, "80"))
            await asyncio.sleep(1)
            await one.ask(SessionEnded(0))
            (finished,) = await one.answers(1)
            assert isinstance(finished, CodeFinished)
            assert finished.trajectory_id == 1
            assert sorted(one.sandbox.told) == sorted(
                ["run 0", "run 0", "grade 0", "run 1", "stopped run 0", "stopped run 0", "stopped grade 0", "end 0"]
            )
            await asyncio.sleep(100)
            assert one.rollout.waiting == 0

    run_virtually(scenario())


def test_a_call_that_has_only_just_arrived_is_stopped_as_well() -> None:
    async def scenario() -> None:
        async with place() as one:
            await one.ask(call(0), SessionEnded(0), call(1, "5"))
            (finished,) = await one.answers(1)
            assert isinstance(finished, CodeFinished)
            assert finished.trajectory_id == 1
            assert one.sandbox.told[-1] == "run 1"
            assert one.sandbox.running == 0

    run_virtually(scenario())


def test_what_is_stopped_makes_room_for_those_that_wait() -> None:
    async def scenario() -> None:
        async with place(max_calls=1) as one:
            await one.ask(call(0, "1000"), call(1))
            await asyncio.sleep(10)
            assert one.sandbox.told == ["run 0"]
            await one.ask(SessionEnded(0))
            (finished,) = await asyncio.wait_for(one.answers(1), 5)
            assert isinstance(finished, CodeFinished)
            assert finished.trajectory_id == 1

    run_virtually(scenario())


def test_a_call_that_waits_for_room_is_stopped_without_having_run() -> None:
    async def scenario() -> None:
        async with place(max_calls=2) as one:
            await one.ask(call(0, "10"), call(1, "10"), call(2, "1"))
            await one.ask(SessionEnded(2))
            await one.answers(2)
            await asyncio.sleep(50)
            assert one.rollout.waiting == 0
            assert "run 2" not in one.sandbox.told

    run_virtually(scenario())


def test_beyond_its_bounds_it_makes_the_sender_wait_and_loses_nothing() -> None:
    """Two in the sandbox, two before it, one in hand, and eight on the bus."""

    async def scenario() -> None:
        async with place(max_calls=2, bound=8) as one:
            sending = asyncio.create_task(one.ask(*(call(number) for number in range(300))))
            await asyncio.sleep(0.5)
            assert not sending.done()
            assert one.sandbox.told == ["run 0", "run 1"]
            assert one.bus.waiting <= 8
            numbers = [message.trajectory_id for message in await one.answers(300)]  # pyright: ignore
            assert [number // 2 for number in numbers] == [number // 2 for number in range(300)]
            assert one.sandbox.most == 2
            await sending

    run_virtually(scenario())


def test_two_full_queues_do_not_wait_for_each_other() -> None:
    """As a rollout process that sends all that an event made it decide before it reads again."""

    async def scenario() -> None:
        async with place(max_calls=2, bound=4) as one:
            await one.ask(*(call(number) for number in range(100)))
            numbers = [message.trajectory_id for message in await one.answers(100)]  # pyright: ignore
            assert sorted(numbers) == list(range(100))

    run_virtually(scenario())


def test_the_end_of_a_trajectory_gets_through_when_there_is_no_room() -> None:
    """Also where every call that is held belongs to it, and none would end for a long time."""

    async def scenario() -> None:
        async with place(max_calls=2) as one:
            await one.ask(*(call(0, "3600", number) for number in range(3)), SessionEnded(0), call(1))
            (finished,) = await asyncio.wait_for(one.answers(1), 5)
            assert isinstance(finished, CodeFinished)
            assert finished.trajectory_id == 1

    run_virtually(scenario())


def test_it_ends_in_the_middle_of_its_work() -> None:
    async def scenario() -> None:
        async with place(max_calls=4) as one:
            await one.ask(*(call(number, "3600") for number in range(6)))
            await asyncio.sleep(1)
        assert one.sandbox.told[-1] == "close"
        assert one.sandbox.running == 0

    run_virtually(scenario())


def test_what_is_not_for_an_executor_is_said_and_changes_nothing() -> None:
    async def scenario() -> None:
        async with place() as one:
            await one.rollout.send_frame("executor-0", b"no message")
            await one.ask(ExecutorJoined("executor-1/1", 3), call(1))
            (finished,) = await one.answers(1)
            assert isinstance(finished, CodeFinished)

    with capture_logs() as said:
        run_virtually(scenario())
    odd = [(entry["event"], entry.get("kind")) for entry in said if entry["log_level"] == "error"]
    assert odd == [("frame.dropped", None), ("message.misdirected", "ExecutorJoined")]

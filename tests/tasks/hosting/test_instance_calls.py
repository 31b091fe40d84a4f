"""Instances of environments in one process: openings, calls that fail or hang, rewards, and one `close` each."""

import asyncio
from functools import partial
from pathlib import Path

import pytest

from asterism.bus.messages import EnvironmentRaised, EnvironmentTimedOut, Observation
from tests.tasks.hosting.hosts import Host, fail, open_host, until

pytestmark = [pytest.mark.slow, pytest.mark.real_clock]

LIMIT_S = 1.0
ENVIRONMENTS = '''
from asterism.tasks.contract import Fault

class World:
    def __init__(self, size: int = 3):
        self.size, self.seen = size, []

    def reset(self, kind, name, **columns):
        self.name = name
        note("reset", name)
        match kind:
            case "raise": raise ValueError("no such world")
            case "fault": raise Fault("the database is down")
            case "bytes": return b"raw"
            case "exit": sys.exit(2)
            case "hang":
                wait_for("reset may end")
                note("reset ended", name)
            case "none": return None
            case "blocks": return [{"type": "text", "text": "blocks"}]
        return f"size {self.size}"

    @tool
    def look(self, what: str) -> str:
        note("look", self.name, what)
        match what:
            case "hang":
                wait_for("look may end")
                note("look ended", self.name)
            case "raise": raise ValueError("boom")
            case "exit": sys.exit(3)
            case "bytes": return b"raw"
            case "fault": raise Fault("the database is down")
        self.seen.append(what)
        return " ".join(self.seen)

    async def wait(self) -> str:
        """Wait."""
        await asyncio.sleep(3600)

    def get_reward(self):
        match self.seen[-1]:
            case "hang": time.sleep(3600)
            case "raise reward": raise ValueError("no reward")
            case "nan": return float("nan")
            case "text": return "1"
            case "dict": return {"steps": 2, "done": True}
            case "wrong dict": return {"steps": None}
        return len(self.seen)

    def close(self):
        note("close", self.name)
        if self.name == "close raises":
            raise ValueError("cannot close")
        if self.name == "close hangs":
            time.sleep(3600)

class Narrow:
    def reset(self, start):
        return str(start)

class Broken:
    def __init__(self):
        raise RuntimeError("no memory")

    def reset(self):
        return ""

class SlowlyMade:
    def __init__(self):
        if not (FOLDER / "may be made").exists():
            note("waits")
        wait_for("may be made")

    def reset(self):
        return "made"

    def close(self):
        note("close")

class AsyncWorld:
    async def reset(self, name, kind=""):
        self.name = name
        while kind == "hang":
            await asyncio.sleep(3600)
        return self.name

    async def look(self) -> str:
        """Look."""
        return self.name

    async def get_reward(self):
        return {"a": 1}

    async def close(self):
        note("close", self.name)
'''


SHARED_HOST = partial(open_host, source=ENVIRONMENTS, name="World", call_limit_s=LIMIT_S)


async def test_an_opening_consists_of_the_question_and_the_text_of_reset(tmp_path: Path) -> None:
    async with open_host(tmp_path, ENVIRONMENTS, "World", parameters={"size": 5}) as host:
        assert await host.open(0, kind="", name="a") == "size 5"
        assert await host.open(1, kind="", name="b", question="Where? ") == "Where? size 5"
        assert await host.open(2, kind="none", name="c", question="Where?") == "Where?"
        assert await host.open(3, kind="blocks", name="d") == "blocks"


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        ("raise", "reset raised ValueError: no such world"),
        ("fault", "the database is down"),
        ("bytes", "reset returned bytes; expected text, a JSON value or a ToolResult"),
        ("exit", "reset raised SystemExit: 2"),
    ],
)
async def test_a_failed_reset_closes_its_instance_once_and_a_second_opening_succeeds(
    host: Host, kind: str, cause: str
) -> None:
    assert await fail(host.open(7, kind=kind, name=f"{kind} first")) == cause
    assert await host.open(7, kind="", name=f"{kind} second") == "size 3"
    assert await host.read("look", 7, what="door") == "door"
    host.pool.end(7)
    await until(lambda: f"close {kind} second" in host.read_journal())
    closed = [line for line in host.read_journal() if line.startswith(f"close {kind} ")]
    assert sorted(closed) == [f"close {kind} first", f"close {kind} second"]


async def test_the_instance_of_a_hanging_reset_is_closed_when_the_reset_ends(tmp_path: Path) -> None:
    async with open_host(tmp_path, ENVIRONMENTS, "World", call_limit_s=LIMIT_S) as host:
        assert await fail(host.open(7, kind="hang", name="first")) == "reset took longer than 1 s"
        assert await host.open(7, kind="", name="second") == "size 3"
        host.release("reset may end")
        await until(lambda: "close first" in host.read_journal())
        journal = host.read_journal()
        assert journal.count("close first") == 1
        assert journal.index("reset ended first") < journal.index("close first")


async def test_an_instance_that_is_created_after_the_time_limit_is_closed(tmp_path: Path) -> None:
    async with open_host(tmp_path, ENVIRONMENTS, "SlowlyMade", call_limit_s=LIMIT_S) as host:
        assert await fail(host.open()) == "reset took longer than 1 s"
        aborted = asyncio.create_task(host.open(1))
        await until(lambda: len(host.read_journal()) == 2)
        aborted.cancel()
        host.pool.end(1)
        await asyncio.wait([aborted])
        host.release("may be made")
        await until(lambda: host.read_journal() == ["waits", "waits", "close", "close"])
        assert await host.open(1) == "made"


async def test_an_async_reset_that_hangs_is_cancelled_and_its_instance_closed(tmp_path: Path) -> None:
    async with open_host(tmp_path, ENVIRONMENTS, "AsyncWorld", call_limit_s=LIMIT_S) as host:
        assert await fail(host.open(0, name="a", kind="hang")) == "reset took longer than 1 s"
        await until(lambda: host.read_journal() == ["close a"])
        assert await host.open(0, name="b") == "b"
        assert await host.read("look") == "b"
        assert await host.score() == {"a": 1.0}


async def test_the_error_for_a_missing_column_of_reset_names_the_column(tmp_path: Path) -> None:
    async with open_host(tmp_path, ENVIRONMENTS, "Narrow") as host:
        assert await fail(host.open(0, other=1, more=2)) == "reset needs the column `start`; the row has other, more"
        assert await host.open(0, start=4, more=2) == "4"


async def test_a_constructor_that_raises_fails_the_opening(tmp_path: Path) -> None:
    async with open_host(tmp_path, ENVIRONMENTS, "Broken") as host:
        for _ in range(2):
            assert await fail(host.open()) == "reset raised RuntimeError: no memory"


async def test_an_exception_of_a_call_is_a_result_for_the_model_and_the_instance_continues(host: Host) -> None:
    await host.open(0, kind="", name="a")
    assert await host.read("look", what="door") == "door"
    assert await host.call("look", what="raise") == EnvironmentRaised("ValueError: boom")
    assert await host.call("look", what="exit") == EnvironmentRaised("SystemExit: 3")
    assert await fail(host.call("look", what="bytes")) == (
        "look returned bytes; expected text, a JSON value or a ToolResult"
    )
    assert await fail(host.call("look", what="fault")) == "the database is down"
    assert await host.call("look", what="wall") == Observation("door wall")


async def test_later_calls_of_an_instance_wait_for_an_abandoned_call(tmp_path: Path) -> None:
    async with open_host(tmp_path, ENVIRONMENTS, "World", call_limit_s=LIMIT_S) as host:
        await host.open(0, kind="", name="a")
        await host.open(1, kind="", name="b")
        assert await host.call("look", what="hang") == EnvironmentTimedOut(LIMIT_S)
        assert await host.call("look", what="early") == EnvironmentTimedOut(LIMIT_S)
        assert await host.read("look", 1, what="door") == "door"
        host.release("look may end")
        assert await host.read("look", what="late") == "hang late"
        looks = [line for line in host.read_journal() if line.startswith("look") and " a" in line]
        assert looks == ["look a hang", "look ended a", "look a late"]


async def test_an_async_call_that_hangs_is_cancelled(host: Host) -> None:
    await host.open(0, kind="", name="a")
    assert await host.call("wait") == EnvironmentTimedOut(LIMIT_S)
    assert await host.read("look", what="door") == "door"


async def test_an_instance_whose_session_ends_during_a_call_is_closed_after_the_call(tmp_path: Path) -> None:
    async with open_host(tmp_path, ENVIRONMENTS, "World") as host:
        await host.open(0, kind="", name="a")
        call = asyncio.create_task(host.call("look", what="hang"))
        await until(lambda: "look a hang" in host.read_journal())
        call.cancel()
        host.pool.end(0)
        assert await host.open(1, kind="", name="b") == "size 3"
        host.release("look may end")
        await until(lambda: "close a" in host.read_journal())
        assert host.read_journal() == ["reset a", "look a hang", "reset b", "look ended a", "close a"]


async def test_the_reward_has_finite_numbers_by_name(tmp_path: Path) -> None:
    async with open_host(tmp_path, ENVIRONMENTS, "World", call_limit_s=LIMIT_S) as host:
        await host.open(0, kind="", name="a")
        for what, found in {"door": {"environment": 1.0}, "dict": {"steps": 2.0, "done": 1.0}}.items():
            await host.call("look", what=what)
            assert await host.score() == found
        for what, cause in {
            "nan": "get_reward returned reward = float nan; expected a finite number",
            "text": "get_reward returned reward = str '1'; expected a finite number",
            "wrong dict": "get_reward returned reward.steps = NoneType None; expected a finite number",
            "raise reward": "get_reward raised ValueError: no reward",
        }.items():
            await host.call("look", what=what)
            assert await fail(host.score()) == cause
        host.release("look may end")
        await host.call("look", what="hang")
        assert await fail(host.score()) == "get_reward took longer than 1 s"


async def test_every_instance_is_closed_once_at_its_end_or_at_the_end_of_the_process(tmp_path: Path) -> None:
    async with open_host(tmp_path, ENVIRONMENTS, "World") as host:
        for trajectory_id in range(60):
            await host.open(trajectory_id, kind="", name=f"n{trajectory_id}")
        await host.open(60, kind="", name="close raises")
        for trajectory_id in (*range(20), 60, 0):
            host.pool.end(trajectory_id)
        assert host.pool.num_instances == 40
        assert await fail(host.call("look", 3, what="door")) == "the instance is not in this process"
    closed = [line for line in host.read_journal() if line.startswith("close")]
    assert sorted(closed) == sorted(f"close {name}" for name in ["close raises", *(f"n{n}" for n in range(60))])


async def test_a_close_that_hangs_does_not_delay_other_closes(tmp_path: Path) -> None:
    async with open_host(tmp_path, ENVIRONMENTS, "World") as host:
        await host.open(0, kind="", name="close hangs")
        await host.open(1, kind="", name="a")
        host.pool.end(0)
        assert await host.read("look", 1, what="door") == "door"
        assert await host.open(0, kind="", name="b") == "size 3"
    assert sorted(line for line in host.read_journal() if line.startswith("close")) == [
        *("close a", "close b", "close close hangs")
    ]

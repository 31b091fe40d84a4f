"""If `init` or `step` of a dialogue fails, the call fails and the trajectory is not scored."""

from functools import partial
from pathlib import Path

import pytest

from asterism.bus.messages import Observation
from tests.tasks.hosting.hosts import Host, fail, open_host, until

pytestmark = [pytest.mark.slow, pytest.mark.real_clock]

LIMIT_S = 1.0
DIALOGUE = """
from asterism.tasks.contract import Fault, Opening, Reply

class User:
    def init(self, row):
        self.turns = 0
        match row["kind"]:
            case "raise": raise ValueError("no user")
            case "hang": wait_for("init may end")
            case "fault": raise Fault("the database is down")
            case "bytes": return b"raw"
            case "text": return "Good day."
            case "messages": return [{"role": "user", "content": "One."}, {"role": "user", "content": "Two."}]
            case "opening": return Opening(messages="Good evening.")
            case "dict": return {"messages": "Good night."}

    def step(self, message):
        self.turns += 1
        match message["content"]:
            case "raise": raise ValueError("boom")
            case "exit": sys.exit(3)
            case "hang": time.sleep(3600)
            case "fault": raise Fault("the database is down")
            case "returned fault": return Reply(fault="the database is down")
            case "fault in a dict": return {"messages": "", "fault": OSError("connection reset")}
            case "bytes": return b"raw"
            case "nan": return Reply(rewards={"x": float("nan")})
            case "text": return f"{message['role']} said {message['content']}"
            case "done": return {"messages": "Bye.", "done": True, "rewards": {"x": 0.5}}
            case "messages": return Reply(messages=[{"role": "user", "content": "One."}], metrics={"m": 1})
        return Reply(messages=str(self.turns))

    def close(self):
        note("close")

class AsyncUser:
    async def init(self, row):
        return "Hi."

    async def step(self, message):
        await asyncio.sleep(3600 if message["content"] == "hang" else 0)
        return "Go on."
"""


SHARED_HOST = partial(open_host, source=DIALOGUE, name="User", call_limit_s=LIMIT_S)


async def test_an_opening_consists_of_the_question_and_the_messages_of_init(host: Host) -> None:
    assert await host.open(0, kind="text") == "Good day."
    assert await host.open(0, kind="text", question="How many?") == "How many?\n\nGood day."
    assert await host.open(1, kind="messages") == "One.\n\nTwo."
    assert await host.open(2, kind="opening") == "Good evening."
    assert await host.open(3, kind="dict", question="Q?") == "Q?\n\nGood night."
    assert await host.open(4, kind="nothing", question="Q?") == "Q?"


async def test_a_step_can_return_texts_messages_and_values(host: Host) -> None:
    await host.open(0, kind="text")
    assert await host.step("text") == Observation("assistant said text")
    assert await host.step("messages") == Observation("One.", metrics={"m": 1.0})
    assert await host.step("done") == Observation("Bye.", True, {"x": 0.5})
    assert await host.step("count") == Observation("4")


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        ("raise", "init raised ValueError: no user"),
        ("hang", "init took longer than 1 s"),
        ("fault", "the database is down"),
        ("bytes", "init returned bytes; expected text, a JSON value or a ToolResult"),
    ],
)
async def test_a_failed_init_fails_the_opening_and_closes_the_instance_once(
    tmp_path: Path, kind: str, cause: str
) -> None:
    async with open_host(tmp_path, DIALOGUE, "User", call_limit_s=LIMIT_S) as host:
        assert await fail(host.open(0, kind=kind)) == cause
        host.release("init may end")
        await until(lambda: host.read_journal() == ["close"])
        assert await host.open(0, kind="text") == "Good day."
    assert host.read_journal() == ["close", "close"]


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        ("raise", "step raised ValueError: boom"),
        ("exit", "step raised SystemExit: 3"),
        ("hang", "step took longer than 1 s"),
        ("fault", "the database is down"),
        ("returned fault", "the database is down"),
        ("fault in a dict", "connection reset"),
        ("bytes", "step returned bytes; expected text, a JSON value or a ToolResult"),
        ("nan", "step returned rewards.x = float nan; expected a finite number"),
    ],
)
async def test_a_failed_step_fails_only_its_own_call(host: Host, content: str, cause: str) -> None:
    await host.open(0, kind="text")
    await host.open(1, kind="text")
    assert await fail(host.step(content)) == cause
    assert await host.step("count", 1) == Observation("1")
    if content != "hang":
        assert await host.step("count") == Observation("2")


async def test_an_async_step_that_hangs_fails_the_call_and_the_next_call_succeeds(tmp_path: Path) -> None:
    async with open_host(tmp_path, DIALOGUE, "AsyncUser", call_limit_s=LIMIT_S) as host:
        assert await host.open(0) == "Hi."
        assert await fail(host.step("hang")) == "step took longer than 1 s"
        assert await host.step("text") == Observation("Go on.")

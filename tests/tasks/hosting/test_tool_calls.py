"""Tools without instances: every call has one answer, and a function that fails does not stop other calls."""

import asyncio
import sys
from functools import partial
from pathlib import Path

import pytest

from asterism.bus.messages import EnvironmentRaised, EnvironmentTimedOut, Observation
from asterism.tasks.hosting.host_process import HostFailure
from asterism.tasks.hosting.task_host import _MAX_ABANDONED  # pyright: ignore[reportPrivateUsage]
from tests.tasks.hosting.hosts import Host, fail, open_host

pytestmark = [pytest.mark.slow, pytest.mark.real_clock]

LIMIT_S = 1.0
TOOLS = '''
from asterism.tasks.contract import Fault, ToolResult

class Odd:
    pass

class Silent(Exception):
    def __str__(self):
        raise RuntimeError("no text")

class Response:
    content = b"raw"

def build(kind):
    match kind:
        case "text": return "hello"
        case "none": return None
        case "number": return 2.5
        case "huge number": return 10**5000
        case "json": return {"b": [1, None], "a": "é"}
        case "result": return ToolResult(content="r", stop=True, rewards={"x": 1}, metrics={"m": 2.5})
        case "dict": return {"content": "d", "done": True, "rewards": {"x": True}}
        case "blocks": return [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
        case "surrogate": return "a\\udcffb"
        case "100 MB": return "x" * 100_000_000
        case "bytes": return b"raw"
        case "object": return Odd()
        case "response": return Response()
        case "set": return {"x": {1}}
        case "image": return [{"type": "image", "data": "..."}]
        case "nan": return ToolResult(content="", rewards={"x": float("nan")})
        case "inf": return {"content": "", "metrics": {"m": float("inf")}}
        case "large": return {"content": "", "rewards": {"x": 10**400}}
        case "list of rewards": return {"content": "", "rewards": [1.0]}
        case "text reward": return {"content": "", "rewards": {"x": "1"}}
        case "returned fault": return ToolResult(content="", fault="the database is down")
        case "fault": raise Fault("the database is down")
        case "raise": raise ValueError("boom")
        case "raise surrogate": raise FileNotFoundError("a\\udcffb")
        case "raise silent": raise Silent
        case "exit": sys.exit(3)
        case "stop": next(iter([]))
        case "cancel": raise asyncio.CancelledError
        case "interrupt": raise KeyboardInterrupt
        case "pid": return os.getpid()

@tool
def do(kind: str) -> object:
    if kind == "hang":
        time.sleep(3600)
    return build(kind)

@tool
async def do_async(kind: str) -> object:
    if kind == "hang":
        await asyncio.sleep(3600)
    while kind == "resist":
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            pass
    return build(kind)

@tool
def awkward(function: str, limit_s: float, self: int) -> str:
    return f"{function} {limit_s} {self}"

def env() -> str:
    """An environment variable."""
    return os.environ["GREETING"]

tools = [do, do_async, awkward, env]
'''


SHARED_HOST = partial(open_host, source=TOOLS, name="tools", call_limit_s=60.0, max_characters=2000)


async def test_the_result_of_a_tool_is_a_text_for_the_model(host: Host) -> None:
    for tool in ("do", "do_async"):
        assert await host.call(tool, kind="text") == Observation("hello")
        assert await host.call(tool, kind="none") == Observation("None")
        assert await host.call(tool, kind="number") == Observation("2.5")
        assert await host.call(tool, kind="json") == Observation('{"b": [1, null], "a": "é"}')
        assert await host.call(tool, kind="result") == Observation("r", True, {"x": 1.0}, {"m": 2.5})
        assert await host.call(tool, kind="dict") == Observation("d", True, {"x": 1.0})
        assert await host.call(tool, kind="blocks") == Observation("one\n\ntwo")
        assert await host.call(tool, kind="surrogate") == Observation("a?b")
    assert await host.read("awkward", function="f", limit_s=1.5, self=3) == "f 1.5 3"


async def test_the_middle_of_a_long_result_is_cut_and_the_process_continues(host: Host) -> None:
    pid = await host.read("do", kind="pid")
    text = await host.read("do", kind="100 MB")
    assert 2000 <= len(text) < 2100
    assert text.startswith("xxx")
    assert text.endswith("xxx")
    assert await host.read("do", kind="pid") == pid


async def test_an_exception_of_a_tool_is_a_result_for_the_model(host: Host) -> None:
    for tool in ("do", "do_async"):
        pid = await host.read(tool, kind="pid")
        assert await host.call(tool, kind="raise") == EnvironmentRaised("ValueError: boom")
        assert await host.call(tool, kind="raise surrogate") == EnvironmentRaised("FileNotFoundError: a?b")
        assert await host.call(tool, kind="raise silent") == EnvironmentRaised("Silent: ")
        assert await host.call(tool, kind="exit") == EnvironmentRaised("SystemExit: 3")
        assert "StopIteration" in await host.read(tool, kind="stop")
        assert await host.call(tool, kind="cancel") == EnvironmentRaised("RuntimeError: CancelledError()")
        assert await host.call(tool, kind="interrupt") == EnvironmentRaised("RuntimeError: KeyboardInterrupt()")
        assert "4300 digits" in await host.read(tool, kind="huge number")
        assert await host.read(tool, kind="pid") == pid


@pytest.mark.parametrize("tool", ["do", "do_async"])
async def test_a_result_that_is_not_text_fails_the_call_with_its_type(host: Host, tool: str) -> None:
    pid = await host.read(tool, kind="pid")
    expected = "expected text, a JSON value or a ToolResult"
    number = "expected a finite number"
    for kind, cause in {
        "bytes": f"returned bytes; {expected}",
        "object": f"returned Odd; {expected}",
        "response": f"returned bytes; {expected}",
        "set": "returned dict, which is no JSON value: Object of type set is not JSON serializable",
        "image": 'returned a content block of the type "image"; only text is supported',
        "nan": f"returned rewards.x = float nan; {number}",
        "inf": f"returned metrics.m = float inf; {number}",
        "large": f"returned rewards.x = int 1{'0' * 79}; {number}",
        "list of rewards": "returned rewards = list; expected numbers by name",
        "text reward": f"returned rewards.x = str '1'; {number}",
    }.items():
        assert await fail(host.call(tool, kind=kind)) == f"{tool} {cause}"
    for kind in ("fault", "returned fault"):
        assert await fail(host.call(tool, kind=kind)) == "the database is down"
    assert await host.read(tool, kind="pid") == pid


async def test_a_tool_that_hangs_fails_only_its_own_call(tmp_path: Path) -> None:
    async with open_host(tmp_path, TOOLS, "tools", call_limit_s=LIMIT_S) as host:
        pid = await host.read("do", kind="pid")
        hanging = [
            asyncio.create_task(host.call(tool, place, kind=kind))
            for place, (tool, kind) in enumerate([("do", "hang"), ("do_async", "hang"), ("do_async", "resist")])
        ]
        assert await asyncio.gather(*[host.read("do", 10 + place, kind="pid") for place in range(40)]) == [pid] * 40
        assert await asyncio.gather(*hanging) == [EnvironmentTimedOut(LIMIT_S)] * 3
        assert await host.read("do", kind="pid") == pid
        assert await host.read("do_async", kind="pid") == pid


async def test_a_process_with_too_many_hanging_threads_exits_and_is_replaced(tmp_path: Path) -> None:
    async with open_host(tmp_path, TOOLS, "tools", call_limit_s=LIMIT_S) as host:
        pid = await host.read("do_async", kind="pid")
        calls = [host.call("do", place, kind="hang") for place in range(_MAX_ABANDONED)]
        assert await asyncio.gather(*calls) == [EnvironmentTimedOut(LIMIT_S)] * _MAX_ABANDONED
        assert await host.read("do_async", kind="pid") == pid
        assert await host.call("do", kind="hang") == EnvironmentTimedOut(LIMIT_S)
        assert await retry(host) != pid


async def retry(host: Host) -> str:
    """Retry a call like the rollout process, because the host process can still be exiting."""
    try:
        return await host.read("do_async", kind="pid")
    except HostFailure as error:
        assert str(error) == 'the host process of task "t" died with exit code 3'
        return await host.read("do_async", kind="pid")


async def test_the_process_has_the_configured_interpreter_and_variables(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$2" >> {tmp_path}/started\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    variables = {"GREETING": "good day"}
    async with open_host(tmp_path, TOOLS, "tools", python=str(python), variables=variables) as host:
        assert await host.read("env") == "good day"
        assert (tmp_path / "started").read_text() == "-c\n"  # the interpreter ran the boot script


async def test_a_missing_interpreter_fails_each_call_with_its_name(tmp_path: Path) -> None:
    async with open_host(tmp_path, TOOLS, "tools", python="/nowhere/python") as host:
        for _ in range(2):
            assert await fail(host.call("do", kind="text")) == 'the host process of task "t" died with exit code 1'


async def test_a_task_that_cannot_be_loaded_fails_each_call_with_its_error(tmp_path: Path) -> None:
    async with open_host(tmp_path, TOOLS, "tools") as host:
        source = tmp_path / "task.py"
        source.write_text("import absent_package\n")
        for _ in range(2):
            cause = await fail(host.call("do", kind="text"))
            assert cause.startswith("tasks.t.import: ")
            assert cause.endswith("needs the module absent_package, which is not installed")

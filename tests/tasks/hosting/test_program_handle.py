"""The sandbox handle runs programs of a task's code at the executor, and raises Fault if the sandbox fails."""

import asyncio
from functools import partial
from pathlib import Path

import pytest

from asterism.bus.messages import EnvironmentRaised
from asterism.tasks.hosting.program_handle import add_files
from asterism.tasks.hosting.wire import ProgramEnded, RunProgram
from tests.tasks.hosting.hosts import Host, fail, open_host

pytestmark = [pytest.mark.slow, pytest.mark.real_clock]

CODE = '''
from asterism.tasks.contract import Fault

def describe(result):
    return f"{result.ok} {result.stdout} {result.stderr} {result.error}"

@tool
async def run(code: str, sandbox) -> str:
    return describe(await sandbox.run(code, stdin="in"))

@tool
def run_blocking(code: str, sandbox) -> str:
    return describe(sandbox.run_blocking(code, files={"data/a.txt": "text"}))

async def run_wrongly(sandbox) -> str:
    """Wait for itself."""
    return sandbox.run_blocking("print(1)").stdout

def tolerate(sandbox) -> str:
    """Continue after a fault."""
    try:
        return sandbox.run_blocking("fault").stdout
    except Fault as fault:
        return f"caught {fault}"

tools = [run, run_blocking, run_wrongly, tolerate]

class Workshop:
    def __init__(self, greeting: str, sandbox):
        self.greeting, self.sandbox = greeting, sandbox

    def reset(self):
        return self.greeting + " " + self.sandbox.run_blocking("reset").stdout

    @tool
    def test(self, code: str, sandbox) -> str:
        assert sandbox is self.sandbox
        return sandbox.run_blocking(code).stdout

    async def get_reward(self):
        return float((await self.sandbox.run("reward")).ok)
'''


async def run_program(request: RunProgram) -> ProgramEnded:
    """Answer requests by the number in their code; requests with higher numbers get earlier answers."""
    if request.code.startswith("late "):
        await asyncio.sleep((50 - int(request.code.split()[1])) / 1000)
    if request.code == "fault":
        return ProgramEnded(request.number, fault="no container")
    if request.code == "raise":
        return ProgramEnded(request.number, "out", "err", "ValueError: boom")
    return ProgramEnded(request.number, f"<{request.trajectory_id} {request.code} {request.stdin}>")


SHARED_HOST = partial(open_host, source=CODE, name="tools", run_program=run_program)


async def test_programs_run_at_the_executor(host: Host) -> None:
    assert await host.read("run", 7, code="print(1)") == "True <7 print(1) in>  "
    assert await host.read("run", 7, code="raise") == "False out err ValueError: boom"
    found = await host.read("run_blocking", 8, code="print(1)")
    assert found == f"True <8 {add_files('print(1)', {'data/a.txt': 'text'})} >  "


async def test_each_program_has_its_own_result(host: Host) -> None:
    found = await asyncio.gather(*[host.read("run", number, code=f"late {number}") for number in range(50)])
    assert found == [f"True <{number} late {number} in>  " for number in range(50)]


async def test_a_sandbox_failure_that_the_task_does_not_handle_fails_the_call(host: Host) -> None:
    assert await fail(host.call("run", code="fault")) == "sandbox: no container"
    assert await host.read("tolerate") == "caught sandbox: no container"


async def test_an_async_function_must_not_call_run_blocking(host: Host) -> None:
    assert await host.call("run_wrongly") == EnvironmentRaised(
        "RuntimeError: run_blocking is for sync functions; an async function awaits sandbox.run(...)"
    )


async def test_constructors_and_methods_receive_the_handle_of_their_trajectory(tmp_path: Path) -> None:
    parameters = {"greeting": "hi"}
    async with open_host(tmp_path, CODE, "Workshop", run_program=run_program, parameters=parameters) as host:
        assert await host.open(5) == "hi <5 reset >"
        assert await host.read("test", 5, code="code") == "<5 code >"
        assert await host.score(5) == {"environment": 1.0}


def test_a_program_finds_its_files_and_keeps_its_line_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    copy = "import pathlib\npathlib.Path('copy').write_bytes(pathlib.Path('a/b.txt').read_bytes())"
    exec(add_files(copy, {"a/b.txt": "é'\n"}), {})
    assert (tmp_path / "copy").read_bytes() == "é'\n".encode()
    with pytest.raises(ZeroDivisionError) as raised:
        exec(add_files("x = 1\n\nx / 0", {"c": ""}), {})
    assert raised.traceback[-1].lineno == 2  # line numbers count from 0
    assert add_files("1", {}) == "1"

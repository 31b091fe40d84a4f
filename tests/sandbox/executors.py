"""Start an executor with a sandbox in another process, and kill the executor while calls run."""

import json
import os
import subprocess
import sys
from typing import Any, NamedTuple

from tests.processes import family, is_running, wait_for_end
from tests.sandbox.conftest import list_call_cgroups

_SCRIPT = """
import asyncio, json, sys
from asterism.bus.messages import CodeRequested
from asterism.configs.schema.machines import SandboxConfig
from asterism.sandbox.select_backend import make_sandbox

async def main(limits, cells, programs):
    sandbox = make_sandbox(SandboxConfig(**limits))
    await sandbox.start()
    for number, code in enumerate(cells):
        await sandbox.run(CodeRequested(number, 0, "jupyter_code", code, ""))
    codes = [*programs, "print(1)"]
    calls = [CodeRequested(50 + n, 0, "python_code_with_standard_io", code, "") for n, code in enumerate(codes)]
    *running, last = [asyncio.create_task(sandbox.run(call)) for call in calls]
    await last
    containers = getattr(sandbox._host, "live_containers", [])
    left = [each.id for each in containers], str(sandbox._host.gate.folder) if containers else ""
    print("here", json.dumps([sandbox.server_pids, *left]), flush=True)  # log lines precede it
    await asyncio.gather(*running, asyncio.sleep(600))

asyncio.run(main(*json.loads(sys.argv[1])))
"""


class Leftovers(NamedTuple):
    """The processes, cgroups, containers and folder that an executor had at its death."""

    processes: list[int]
    cgroups: set[str]  # cgroup folders of its fork servers
    containers: list[str]
    folder: str  # folder of the connections to the containers


def kill_an_executor(cells: list[str], programs: list[str], **limits: Any) -> Leftovers:
    """Run the cells, kill the executor while the programs run, and wait until its processes have ended."""
    arguments = json.dumps([limits, cells, programs])
    with subprocess.Popen([sys.executable, "-c", _SCRIPT, arguments], stdout=subprocess.PIPE, text=True) as executor:
        assert executor.stdout is not None
        report = next(line for line in executor.stdout if line.startswith("here "))
        servers, containers, folder = json.loads(report.removeprefix("here "))
        processes = family(*servers)
        cgroups = {str(cgroup.parent.parent) for cgroup in list_call_cgroups(servers)}
        pidfds = [os.pidfd_open(pid) for pid in processes]
        executor.kill()
    for pidfd in pidfds:
        wait_for_end(pidfd)
    assert [pid for pid in processes if is_running(pid)] == []
    return Leftovers(processes, cgroups, containers, folder)

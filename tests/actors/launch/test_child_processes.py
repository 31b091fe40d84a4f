"""A launcher starts child processes, reads their exit reasons, and kills whole process groups."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from asterism.actors.launch.child_processes import (
    ChildProcess,
    ChildProcesses,
    build_process_died_error,
    build_thread_environment,
)
from asterism.actors.launch.supervisor import is_unusable_exit
from asterism.bus.process.exit_reason import ExitReason, exit_reason_path, read_exit_reason, write_exit_reason
from asterism.configs.run_folder import RunFolder
from tests.processes import family, wait_for_end

pytestmark = [pytest.mark.slow, pytest.mark.real_clock, pytest.mark.timeout(60)]

FOREVER = "import signal; print('here', flush=True); signal.pause()"


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


@pytest.fixture
@asynccontextmanager
async def children(tmp_path: Path) -> AsyncIterator[ChildProcesses]:
    folder = RunFolder(tmp_path)
    folder.logs.mkdir()
    children = ChildProcesses(folder)
    try:
        yield children
    finally:
        for name in children.names:
            await children.kill(name)


async def wait_for_output(child: ChildProcess) -> None:
    while "here" not in read_exit_reason(child.output_path, child.exit_reason_path):  # noqa: ASYNC110 - output has no event to wait for
        await asyncio.sleep(0.01)


async def test_the_error_of_a_child_has_its_name_exit_code_and_output(children: ChildProcesses, tmp_path: Path) -> None:
    code = "import sys; print(*range(20), sep='\\n'); sys.exit(3)"
    child = await children.spawn("one", python(code), build_thread_environment(2))
    assert await children.wait_for_exit("one", 30.0)
    assert children.list_failed() == [child]
    assert read_exit_reason(child.output_path, child.exit_reason_path, 2) == "18\n19"
    message = str(build_process_died_error(child, "twice, the last time "))
    assert message.startswith("one ended twice, the last time with exit code 3:\n8\n9\n")
    assert str(tmp_path / "logs" / "one.out") in message
    children.remove("one")
    assert children.names == []


async def test_the_exit_reason_replaces_output_that_a_full_disk_lost(children: ChildProcesses, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    reason_path = exit_reason_path(folder, "one")
    reason_path.parent.mkdir()
    try:
        write_exit_reason(folder, "one", ExitReason("of an earlier incarnation"))
        child = await children.spawn("one", python("import sys; sys.exit(1)"), {})
        assert await children.wait_for_exit("one", 30.0)
        assert read_exit_reason(child.output_path, child.exit_reason_path) == ""
        assert not is_unusable_exit(1, child)
        reason_path.write_bytes(b'{"text":"metr')  # the process was killed while it wrote its reason
        assert read_exit_reason(child.output_path, child.exit_reason_path) == ""
        reason_path.unlink()
        write_exit_reason(folder, "one", ExitReason("metrics.jsonl: No space left on device"))
        write_exit_reason(folder, "one", ExitReason("a consequence", "exception"))
        assert read_exit_reason(child.output_path, child.exit_reason_path) == "metrics.jsonl: No space left on device"
        assert is_unusable_exit(1, child)
        child.output_path.write_text("a warning\nmetrics.jsonl: No space left on device\n")
        assert read_exit_reason(child.output_path, child.exit_reason_path).startswith("a warning\n")
    finally:
        shutil.rmtree(reason_path.parent)


async def test_a_child_has_its_thread_count_and_a_separate_session(children: ChildProcesses) -> None:
    code = "import os; print(os.getppid(), os.environ['OMP_NUM_THREADS'], os.getpid() == os.getsid(0))"
    child = await children.spawn("one", python(code), build_thread_environment(2))
    assert await children.wait_for_exit("one", 30.0)
    assert read_exit_reason(child.output_path, child.exit_reason_path) == f"{os.getpid()} 2 True"


async def test_a_child_is_killed_with_its_process_group(children: ChildProcesses) -> None:
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {FOREVER!r}])"
    child = await children.spawn("one", python(code), build_thread_environment(1))
    await wait_for_output(child)
    members = family(child.process.pid)
    assert len(members) == 2
    assert not await children.wait_for_exit("one", 0.01)
    grandchild = os.pidfd_open(members[1])
    with capture_logs() as logged:
        await children.kill("one")
    wait_for_end(grandchild)
    assert child.process.returncode == -signal.SIGKILL
    assert [(entry["event"], entry["name"]) for entry in logged] == [("process.killed", "one")]
    await children.kill("one")  # a kill of a dead child has no effect


async def test_a_child_with_a_cancelled_start_can_still_be_killed(children: ChildProcesses) -> None:
    starting = asyncio.create_task(children.spawn("sleeper", ["sleep", "60"], {}))
    await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert children.names == ["sleeper"]
    await children.kill("sleeper")
    assert await children.wait_for_exit("sleeper", 5)


def test_a_child_that_starts_after_its_parents_death_exits() -> None:
    code = "from asterism.bus.process.parent_death import die_with_parent; die_with_parent(1); print('alive')"
    orphan = subprocess.run(python(code), capture_output=True, text=True)
    assert (orphan.returncode, orphan.stdout) == (-signal.SIGKILL, "")


def test_a_child_without_output_has_an_empty_exit_reason(tmp_path: Path) -> None:
    class Exited:
        returncode = -9

    child = ChildProcess("one", Exited(), tmp_path / "one.out", tmp_path / "one.exit")  # pyright: ignore[reportArgumentType]
    assert read_exit_reason(child.output_path, child.exit_reason_path) == ""
    assert str(build_process_died_error(child)).startswith("one ended with exit code -9:\n\n")

"""The processes that a launcher starts: named, watched, ended with all that they started, and their last words."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from actors.children import Child, Children, death_of, last_words, threads
from actors.supervisor import unusable
from bus.last_words import words_of
from configs.run_folder import RunFolder
from tests.processes import family, wait_for_end

pytestmark = pytest.mark.slow

FOREVER = "import signal; print('here', flush=True); signal.pause()"


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def play(scenario: Callable[[Children], Coroutine[Any, Any, None]], outputs: Path) -> None:
    async def live() -> None:
        folder = RunFolder(outputs)
        folder.logs.mkdir()
        children = Children(folder)
        try:
            await scenario(children)
        finally:
            for name in children.names:
                await children.kill(name)

    asyncio.run(asyncio.wait_for(live(), 60))


async def until_said(child: Child) -> None:
    while "here" not in last_words(child):  # noqa: ASYNC110 - it tells nobody
        await asyncio.sleep(0.01)


def test_a_child_that_ends_by_itself_is_waited_for_and_named_with_its_last_words(tmp_path: Path) -> None:
    async def scenario(children: Children) -> None:
        code = "import sys; print(*range(20), sep='\\n'); sys.exit(3)"
        child = await children.spawn("one", python(code), threads(2))
        assert await children.wait("one", 30.0)
        assert children.ended_badly() == [child]
        assert last_words(child, 2) == "18\n19"
        told = str(death_of(child, "twice, at last "))
        assert told.startswith("one ended twice, at last with exit code 3:\n8\n9\n")
        assert str(tmp_path / "logs" / "one.out") in told
        children.forget("one")
        assert children.names == []

    play(scenario, tmp_path)


def test_what_a_child_said_in_memory_is_told_where_the_disk_had_no_room_for_it(tmp_path: Path) -> None:
    async def scenario(children: Children) -> None:
        words = words_of(RunFolder(tmp_path), "one")
        words.parent.mkdir()
        try:
            words.write_text("of an earlier life\n")
            child = await children.spawn("one", python("import sys; sys.exit(1)"), {})
            assert await children.wait("one", 30.0)
            assert last_words(child) == ""
            assert not unusable(1, child)
            words.write_text("metrics.jsonl: No space left on device\n")
            assert last_words(child) == "metrics.jsonl: No space left on device"
            assert unusable(1, child)
            child.output.write_text("a warning\nmetrics.jsonl: No space left on device\n")
            assert last_words(child).startswith("a warning\n")
        finally:
            shutil.rmtree(words.parent)

    play(scenario, tmp_path)


def test_a_child_knows_its_threads_and_the_process_that_it_dies_with(tmp_path: Path) -> None:
    async def scenario(children: Children) -> None:
        code = "import os; print(os.getppid(), os.environ['OMP_NUM_THREADS'], os.getpid() == os.getsid(0))"
        child = await children.spawn("one", python(code), threads(2))
        assert await children.wait("one", 30.0)
        assert last_words(child) == f"{os.getpid()} 2 True"

    play(scenario, tmp_path)


def test_who_does_not_end_in_time_is_killed_with_all_that_it_started(tmp_path: Path) -> None:
    async def scenario(children: Children) -> None:
        code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {FOREVER!r}])"
        child = await children.spawn("one", python(code), threads(1))
        await until_said(child)
        members = family(child.process.pid)
        assert len(members) == 2
        assert not await children.wait("one", 0.01)
        grandchild = os.pidfd_open(members[1])
        with capture_logs() as said:
            await children.kill("one")
        wait_for_end(grandchild)
        assert child.process.returncode == -signal.SIGKILL
        assert [(entry["event"], entry["name"]) for entry in said] == [("process.killed", "one")]
        await children.kill("one")  # who is dead stays so

    play(scenario, tmp_path)


def test_who_starts_after_its_parent_has_died_ends_itself() -> None:
    code = "from bus.death import die_with_parent; die_with_parent(1); print('lives')"
    orphan = subprocess.run(python(code), capture_output=True, text=True)
    assert (orphan.returncode, orphan.stdout) == (-signal.SIGKILL, "")


def test_a_child_that_never_printed_has_no_last_words(tmp_path: Path) -> None:
    class Silent:
        returncode = -9

    child = Child("one", Silent(), tmp_path / "one.out")  # pyright: ignore[reportArgumentType]
    assert last_words(child) == ""
    assert str(death_of(child)).startswith("one ended with exit code -9:\n\n")

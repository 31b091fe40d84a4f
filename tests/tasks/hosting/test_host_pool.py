"""When a host process dies, the pool repeats the calls of its instances, or the calls fail with the cause."""

import asyncio
import os
import signal
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from asterism.bus.messages import AnsweredCall, EnvironmentHistory, EnvironmentRestored, Observation, digest_outcome
from asterism.tasks.hosting.host_process import HostFailure
from tests.processes import is_running
from tests.tasks.hosting.hosts import HEAD, Host, fail, open_host, until

pytestmark = [pytest.mark.slow, pytest.mark.real_clock]

NUM_INSTANCES = 1000
DIED = 'the host process of task "t" died with exit code -9'
LOST = "the process that had the instance died"
COUNTERS = '''
class Counter:
    async def reset(self, start):
        self.calls = [str(start)]
        return str(start)

    @tool
    async def add(self, word: str) -> str:
        self.calls.append(word)
        if word == "hold":
            note("held", self.calls[0])
            while not (FOLDER / "go").exists():
                await asyncio.sleep(0.01)
        if word == "die once" and not (FOLDER / "dead").exists():
            (FOLDER / "dead").touch()
            os._exit(9)
        if word == "die":
            os._exit(9)
        return " ".join(self.calls)

    async def pid(self) -> str:
        """Differs between processes."""
        return str(os.getpid())

    async def fork(self) -> str:
        """Leave a child process that has the connection, too."""
        child = os.fork()
        if child == 0:
            time.sleep(3600)
            os._exit(0)
        return str(child)

    async def slow(self) -> str:
        """Never ends."""
        await asyncio.sleep(3600)

    async def get_reward(self):
        return len(self.calls)

    async def close(self):
        note("close", os.getpid(), self.calls[0])

class Replayable(Counter):
    replayable = True
'''
SHARED_HOST = partial(open_host, source=COUNTERS, name="Replayable")
# This program prints the pid of its host process, and hangs.
EXECUTOR = f"""
import asyncio, sys, time
sys.path.insert(0, {str(Path(__file__).parents[3])!r})
from pathlib import Path
from asterism.bus.messages import EnvironmentCalled
from asterism.tasks.hosting.host_pool import HostPool
from asterism.tasks.hosting.host_process import HostCommand
from asterism.tasks.math_python import MATH_PYTHON
from asterism.tasks.hosting.wire import HostSettings

async def run():
    settings = HostSettings(task="t", import_path=str(Path(__file__).parent / "tools.py") + ":do")
    pool = HostPool(HostCommand(settings), MATH_PYTHON, None)
    result = await pool.call(EnvironmentCalled(0, 0, "t", "do", b"{{}}"))
    print(result.outcome.content, flush=True)
    await asyncio.sleep(3600)

asyncio.run(run())
"""


async def kill(host: Host) -> None:
    """Kill all processes of the pool."""
    for pid in host.pool.pids:
        os.kill(pid, signal.SIGKILL)
        await until(lambda pid=pid: not is_running(pid))


async def find_causes(*calls: "asyncio.Future[str]") -> Counter[str]:
    """Count the causes of the failed calls and the results of the successful calls."""
    found = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(each, str | HostFailure) for each in found)
    return Counter(map(str, found))


async def open_counters(host: Host, count: int) -> None:
    found = await asyncio.gather(*[host.open(number, start=number) for number in range(count)])
    assert found == [str(number) for number in range(count)]


async def add_everywhere(host: Host, word: str, count: int = NUM_INSTANCES) -> list[str]:
    return await asyncio.gather(*[host.read("add", number, word=word) for number in range(count)])


async def test_replayable_instances_of_a_killed_process_continue_with_their_state(tmp_path: Path) -> None:
    async with open_host(tmp_path, COUNTERS, "Replayable") as host:
        await open_counters(host, NUM_INSTANCES)
        await add_everywhere(host, "a")
        await add_everywhere(host, "b")
        before = host.pool.pids
        await kill(host)
        assert await add_everywhere(host, "c") == [f"{number} a b c" for number in range(NUM_INSTANCES)]
        assert set(host.pool.pids).isdisjoint(before)
        await kill(host)
        assert await host.score(5) == {"environment": 4.0}
        assert await host.read("add", 6, word="d") == "6 a b c d"
        assert host.pool.num_instances == NUM_INSTANCES
    pids = {line.split()[1] for line in host.read_journal()}
    assert len(host.read_journal()) == 2  # two instances lived in the last process
    assert len(pids) == 1


async def test_each_instance_of_a_killed_process_that_is_not_replayable_fails_with_the_cause(tmp_path: Path) -> None:
    async with open_host(tmp_path, COUNTERS, "Counter") as host:
        await open_counters(host, NUM_INSTANCES)
        await add_everywhere(host, "a")
        await kill(host)
        causes = await find_causes(*[host.read("add", number, word="b") for number in range(NUM_INSTANCES)])
        assert set(causes) <= {DIED, LOST}
        assert causes.total() == NUM_INSTANCES
        assert await fail(host.read("add", 3, word="c")) == LOST
        assert await fail(host.score(4)) == LOST
        for number in range(NUM_INSTANCES):
            host.pool.end(number)
        await open_counters(host, 10)
        assert await add_everywhere(host, "d", 10) == [f"{number} d" for number in range(10)]


async def test_calls_in_flight_of_replayable_instances_are_repeated(tmp_path: Path) -> None:
    async with open_host(tmp_path, COUNTERS, "Replayable") as host:
        await open_counters(host, 20)
        await add_everywhere(host, "a", 20)
        calls = asyncio.gather(*[host.read("add", number, word="hold") for number in range(20)])
        await until(lambda: len(host.read_journal()) == 20)
        host.release("go")
        await kill(host)
        assert await calls == [f"{number} a hold" for number in range(20)]
        assert await add_everywhere(host, "b", 20) == [f"{number} a hold b" for number in range(20)]


async def test_calls_in_flight_of_other_instances_fail_once(tmp_path: Path) -> None:
    async with open_host(tmp_path, COUNTERS, "Counter") as host:
        await open_counters(host, 20)
        calls = find_causes(*[host.read("add", number, word="hold") for number in range(20)])
        waiting = asyncio.create_task(calls)
        await until(lambda: len(host.read_journal()) == 20)
        await kill(host)
        assert await waiting == {DIED: 20}
        assert await host.open(3, start=7) == "7"


async def test_the_death_of_a_process_is_detected_although_a_forked_child_keeps_the_connection(tmp_path: Path) -> None:
    async with open_host(tmp_path, COUNTERS, "Counter") as host:
        await open_counters(host, 2)
        child = int(await host.read("fork"))
        try:
            assert await fail(host.read("add", 1, word="die")) == DIED.replace("-9", "9")
            assert await host.open(2, start=2) == "2"
            assert is_running(child)
        finally:
            os.kill(child, signal.SIGKILL)


async def test_host_processes_end_with_their_parent_process(tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text(f"{HEAD}\ndef do() -> str:\n    'Do it.'\n    return str(os.getpid())\n")
    (tmp_path / "executor.py").write_text(EXECUTOR)
    script = str(tmp_path / "executor.py")
    executor = await asyncio.create_subprocess_exec(sys.executable, script, stdout=asyncio.subprocess.PIPE)
    assert executor.stdout is not None
    pid = int(await executor.stdout.readline())
    assert is_running(pid)
    assert os.getsid(pid) == pid  # ^C in the executor's terminal does not reach the host process
    executor.kill()
    await executor.wait()
    await until(lambda: not is_running(pid))


async def test_an_opening_in_flight_is_repeated_even_if_the_task_is_not_replayable(tmp_path: Path) -> None:
    async with open_host(tmp_path, COUNTERS, "Counter") as host:
        await host.open(0, start=0)
        await kill(host)
        assert await asyncio.gather(*[host.open(number, start=number) for number in range(1, 5)]) == list("1234")
        assert await fail(host.read("add", 0, word="a")) == LOST


async def test_a_call_that_ends_its_process_twice_fails(host: Host) -> None:
    await open_counters(host, 2)
    assert await host.read("add", word="die once") == "0 die once"
    assert await fail(host.read("add", 1, word="die")) == DIED.replace("-9", "9")
    assert await host.read("add", 1, word="a") == "1 a"
    assert await host.read("add", word="a") == "0 die once a"


async def test_a_repeated_call_with_another_result_fails_the_call(host: Host) -> None:
    await open_counters(host, 2)
    await host.read("add", word="a")
    await host.read("pid")
    await kill(host)
    for _ in range(2):
        assert await fail(host.read("add", word="b")) == "call 2 of pid has another result when it is repeated"
    assert await host.read("add", 1, word="b") == "1 b"


async def test_a_timeout_is_repeated_like_a_result(tmp_path: Path) -> None:
    async with open_host(tmp_path, COUNTERS, "Replayable", call_limit_s=1.0) as host:
        await open_counters(host, 1)
        await host.call("slow")
        await kill(host)
        assert await host.read("add", word="a") == "0 a"


async def test_a_restored_instance_repeats_its_calls_before_its_next_call(tmp_path: Path) -> None:
    texts = {b'{"start":4}': "4", b'{"word":"a"}': "4 a", b'{"word":"b"}': "4 a b"}
    calls = tuple(
        AnsweredCall("add" if b"word" in arguments else "", arguments, digest_outcome(Observation(text)))
        for arguments, text in texts.items()
    )
    async with open_host(tmp_path, COUNTERS, "Replayable") as host:
        host.pool.restore(EnvironmentRestored(4, "t", calls))
        assert await host.read("add", 4, word="c") == "4 a b c"
        host.pool.restore(EnvironmentRestored(5, "t", (calls[0], calls[2])))
        assert await fail(host.score(5)) == "call 1 of add has another result when it is repeated"
        assert await host.pool.repeat(EnvironmentRestored(6, "t", calls)) == EnvironmentHistory(calls)
        assert await host.score(6) == {"environment": 3.0}
    async with open_host(tmp_path, COUNTERS, "Counter") as host:
        host.pool.restore(EnvironmentRestored(4, "t", calls))
        assert await fail(host.read("add", 4, word="c")) == LOST


async def test_instances_are_spread_over_processes_and_fail_only_with_their_own_process(tmp_path: Path) -> None:
    async with open_host(tmp_path, COUNTERS, "Counter", processes=2) as host:
        await open_counters(host, 10)
        pids = [await host.read("pid", number) for number in range(10)]
        assert sorted(Counter(pids).values()) == [5, 5]
        for number in range(10):
            if pids[number] == pids[0]:
                host.pool.end(number)
        for number in range(20, 25):
            assert await host.open(number, start=number) == str(number)
            assert await host.read("pid", number) == pids[0]
        os.kill(int(pids[0]), signal.SIGKILL)
        survivors = [number for number in range(10) if pids[number] != pids[0]]
        assert [await host.read("add", number, word="a") for number in survivors] == [f"{n} a" for n in survivors]
        assert await fail(host.read("add", 20, word="a")) in (DIED, LOST)


async def test_calls_of_one_instance_are_made_one_after_another(host: Host) -> None:
    await open_counters(host, 1)
    words = [str(number) for number in range(50)]
    found = await asyncio.gather(*[host.read("add", word=word) for word in words])
    assert found == [" ".join(["0", *words[: place + 1]]) for place in range(50)]


async def test_a_cancelled_call_does_not_cancel_the_calls_of_other_instances(tmp_path: Path) -> None:
    async with open_host(tmp_path, COUNTERS, "Counter") as host:
        starts = [asyncio.create_task(host.open(number, start=number)) for number in range(3)]
        await asyncio.sleep(0)
        starts[0].cancel()  # the process is starting, and the cancelled call waits
        host.pool.end(0)
        assert await asyncio.gather(*starts[1:]) == ["1", "2"]
        held = asyncio.create_task(host.read("add", 1, word="hold"))
        await until(lambda: host.read_journal() == ["held 1"])
        held.cancel()
        host.pool.end(1)
        await until(lambda: any(line.startswith("close") for line in host.read_journal()))
        assert await host.read("add", 2, word="a") == "2 a"

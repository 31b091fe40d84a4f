"""Tests of a call's access and resource limits, with and without namespaces, and of common libraries."""

import asyncio
import textwrap

import pytest

from asterism.bus.messages import CodeOk, CodeOutcome, CodeOutOfMemory, CodeRaised, CodeTimedOut, Output
from asterism.sandbox.escape_test import run_escape_attempts
from asterism.sandbox.inside.isolation import landlock
from tests.sandbox.conftest import Client, StartSandbox, nightly_in_containers

pytestmark = [pytest.mark.slow, pytest.mark.real_clock]
LIMITS = {"time_limit_s": 1.0, "memory_mib": 128}

COMMON_LIBRARIES = """
    import asyncio, ctypes, mmap, multiprocessing, os, sqlite3, subprocess, sys, tempfile, threading
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import shared_memory

    def square(x):
        return x * x

    fork = multiprocessing.get_context("fork")
    with fork.Pool(2) as pool:
        assert pool.map(square, range(4)) == [0, 1, 4, 9]
    with ProcessPoolExecutor(2, fork) as pool:
        assert list(pool.map(square, [5])) == [25]
    queue = fork.Queue()
    child = fork.Process(target=queue.put, args=("from a child",))
    child.start()
    assert queue.get() == "from a child"
    child.join()
    shared = shared_memory.SharedMemory(create=True, size=1000)
    shared.buf[0] = 7
    shared.close()
    shared.unlink()
    with tempfile.NamedTemporaryFile("w+") as file:
        file.write("x")
        file.flush()
        assert open(file.name).read() == "x"
    os.makedirs("a/b")
    os.rename(tempfile.mkdtemp(dir="a"), "a/b/moved")
    assert subprocess.run(["sh", "-c", "echo sub; exit 3"], capture_output=True).stdout == b"sub\\n"
    results = []
    thread = threading.Thread(target=results.append, args=(1,))
    thread.start()
    thread.join()
    compare = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int), ctypes.POINTER(ctypes.c_int))
    numbers = (ctypes.c_int * 3)(3, 1, 2)
    ctypes.CDLL(None).qsort(numbers, 3, 4, compare(lambda a, b: a[0] - b[0]))
    assert list(numbers) == [1, 2, 3] and results == [1]
    assert asyncio.run(asyncio.sleep(0.001, 5)) == 5
    database = sqlite3.connect("x.db")
    with database:
        database.execute("pragma journal_mode=wal")
        database.execute("create table t (x)")
        database.executemany("insert into t values (?)", [(n,) for n in range(1000)])
    assert sqlite3.connect("x.db").execute("select count(*) from t").fetchall() == [(1000,)]
    database.execute("begin immediate")
    if os.fork() == 0:
        other = sqlite3.connect("x.db", timeout=0)
        try:
            other.execute("begin immediate")
        except sqlite3.OperationalError:
            os._exit(7)
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 7
    mmap.mmap(-1, 4096, mmap.MAP_PRIVATE)[0] = 1
    print(sys.stdin.read(), end="")
"""


async def run_and_read(client: Client, code: str, stdin: str = "") -> str:
    outcome: CodeOutcome = (await client.program(textwrap.dedent(code), stdin)).outcome
    assert isinstance(outcome, CodeOk), outcome
    return outcome.output.stdout


@pytest.mark.parametrize("imports", ["", "import numpy, sympy\n"])
async def test_common_libraries_work(client: Client, imports: str) -> None:
    assert await run_and_read(client, imports + textwrap.dedent(COMMON_LIBRARIES), "the input") == "the input"


async def test_the_input_is_an_unnamed_file_of_the_call(client: Client) -> None:
    code = "import os\nprint(os.fstat(0).st_nlink, os.lseek(0, 0, 2), os.listdir())"
    assert await run_and_read(client, code, "x" * 100_000) == "0 100000 []\n"
    outcome = (await client.program("import os\nos.memfd_create('x')")).outcome
    assert isinstance(outcome, CodeRaised)
    assert outcome.error.startswith("PermissionError")


SIGNALS_ITS_CHILD = """
    import os, time
    child = os.fork()
    if child == 0:
        time.sleep(60)
    os.kill(child, 15)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    try:
        os.kill(os.getppid() or 2**22, 0)
        print("reached")
    except OSError:
        pass
"""


async def test_a_call_can_only_signal_its_own_children(client: Client) -> None:
    assert await run_and_read(client, SIGNALS_ITS_CHILD) == "-15\n"


async def test_a_call_without_namespaces_reaches_no_files_or_processes_of_the_machine(
    start_sandbox: StartSandbox,
) -> None:
    code = """
        import os
        def tries(path, flags):
            try:
                os.close(os.open(path, flags))
                return path
            except OSError:
                return None
        seen = ["/etc/passwd", "/etc", "/", "/root", "/home", "/proc/self/status", "/proc/1/environ", "/sys", "/dev", "/tmp", ".."]
        print([path for path in seen if tries(path, os.O_RDONLY)])
        print([path for path in ["/usr/x", "/tmp/x", "../x", "/dev/shm/x"] if tries(path, os.O_CREAT | os.O_WRONLY)])
        open("/dev/null", "w").write(open("/dev/urandom", "rb").read(2).hex())
        open("mine", "w").write("x")
        print(os.path.isdir("/usr/lib") and bool(os.listdir("/usr/lib")), os.listdir())
    """
    async with start_sandbox(namespaces="off") as client:
        assert client.isolation.landlock == landlock.get_abi_version()
        assert await run_and_read(client, code) == "[]\n[]\nTrue ['mine']\n"
        assert await client.printed("open('mine', 'w').write('abc')") == "3\n"
        mine = (await client.printed("import os; print(os.getcwd())")).strip()
        with pytest.raises(AssertionError, match="PermissionError"):
            await run_and_read(client, f"print(open({mine!r} + '/mine').read())")
        assert await run_and_read(client, SIGNALS_ITS_CHILD) == "-15\n"


GROWS_IN_MANY = """
    import os, time
    for _ in range(7):
        if os.fork() == 0:
            break
    kept = [bytearray(b"x") * (1 << 20) for _ in range(48)]
    time.sleep(60)
"""
SHARES = """
    import os, time
    kept = bytearray(b"x") * (96 << 20)
    children = []
    for _ in range(5):
        children.append(os.fork())
        if children[-1] == 0:
            time.sleep(0.4)
            os._exit(0)
    for child in children:
        os.waitpid(child, 0)
    print("shared")
"""


async def test_the_memory_limit_applies_to_all_processes_of_a_call_together(client: Client) -> None:
    outcome = (await client.program(textwrap.dedent(GROWS_IN_MANY))).outcome
    assert isinstance(outcome, CodeOutOfMemory), outcome
    assert await run_and_read(client, SHARES) == "shared\n"
    assert await client.printed("x = 5") == ""
    outcome = (await client.cell(textwrap.dedent(GROWS_IN_MANY))).outcome
    assert isinstance(outcome, CodeOutOfMemory), outcome
    assert await client.printed("x") == "5\n"


@nightly_in_containers
async def test_concurrent_endless_and_growing_calls_each_get_their_outcome(client: Client) -> None:
    computes = "n = 0\nfor i in range(1_000_000): n += i\nprint(n)"
    grows = "kept = []\nwhile True: kept.append(bytearray(b'x') * (1 << 20))"
    calls = [client.program("while True: pass", trajectory=10 + n) for n in range(3)]
    calls += [client.program(grows, trajectory=20 + n) for n in range(3)]
    calls += [client.program(computes, trajectory=30 + n) for n in range(3)]
    outcomes = [result.outcome for result in await asyncio.gather(*calls)]
    assert [type(outcome) for outcome in outcomes] == [CodeTimedOut] * 3 + [CodeOutOfMemory] * 3 + [CodeOk] * 3
    assert (await client.program("print(1)")).outcome == CodeOk(Output("1\n"))


@nightly_in_containers
async def test_a_notebook_continues_after_a_cell_that_waited_for_time_slices(client: Client) -> None:
    loops = [client.program("while True: pass", trajectory=10 + n) for n in range(3)]
    cell = client.cell("n = 0\nfor i in range(1_000_000): n += i\nprint(n)")
    computed, *outcomes = await asyncio.gather(cell, *loops)
    assert isinstance(computed.outcome, CodeOk)
    assert computed.outcome.output.stdout == f"{sum(range(1_000_000))}\n"
    assert [type(result.outcome) for result in outcomes] == [CodeTimedOut] * 3
    assert await client.printed("n + 1") == f"{sum(range(1_000_000)) + 1}\n"


@nightly_in_containers  # test_sandbox_commands.py does this in containers
async def test_escape_attempts_are_contained_and_reported_with_a_reason(client: Client) -> None:
    findings = await run_escape_attempts(client.sandbox)
    assert [finding.name for finding in findings if not finding.contained] == []
    assert [finding.name for finding in findings if not finding.detail or "AssertionError" in finding.detail] == []

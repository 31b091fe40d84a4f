"""What a call may see, take and change, with namespaces and without; what usual libraries need stays possible."""

from __future__ import annotations

import textwrap

import pytest

from bus.messages import CodeOk, CodeOutcome, CodeRaised
from sandbox.inside import landlock
from tests.sandbox.conftest import Client, Play

pytestmark = pytest.mark.slow

USUAL_LIBRARIES = """
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
    assert sqlite3.connect("x.db").execute("select 1").fetchall() == [(1,)]
    mmap.mmap(-1, 4096)[0] = 1
    print(sys.stdin.read(), end="")
"""


async def printed_by(client: Client, code: str, stdin: str = "") -> str:
    outcome: CodeOutcome = (await client.program(textwrap.dedent(code), stdin)).outcome
    assert isinstance(outcome, CodeOk), outcome
    return outcome.output.stdout


@pytest.mark.parametrize("imports", ["", "import numpy, sympy\n"])
def test_usual_libraries_work(play: Play, imports: str) -> None:
    async def scenario(client: Client) -> None:
        assert await printed_by(client, imports + textwrap.dedent(USUAL_LIBRARIES), "the input") == "the input"

    play(scenario)


def test_the_input_is_a_file_of_the_call_alone(play: Play) -> None:
    async def scenario(client: Client) -> None:
        code = "import os\nprint(os.fstat(0).st_nlink, os.lseek(0, 0, 2), os.listdir())"
        assert await printed_by(client, code, "x" * 100_000) == "0 100000 []\n"
        outcome = (await client.program("import os\nos.memfd_create('x')")).outcome
        assert isinstance(outcome, CodeRaised)
        assert outcome.error.startswith("PermissionError")

    play(scenario)


def test_without_namespaces_a_call_still_reads_and_writes_nothing_of_the_machine(play: Play) -> None:
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

    async def scenario(client: Client) -> None:
        assert client.isolation.landlock == landlock.version()
        assert await printed_by(client, code) == "[]\n[]\nTrue ['mine']\n"
        assert await client.printed("open('mine', 'w').write('abc')") == "3\n"
        mine = (await client.printed("import os; print(os.getcwd())")).strip()
        assert await printed_by(client, f"import os\nprint(os.access({mine!r} + '/mine', os.R_OK))") == "False\n"
        with pytest.raises(AssertionError, match="PermissionError"):
            await printed_by(client, f"print(open({mine!r} + '/mine').read())")

    play(scenario, namespaces="off")


def test_a_call_ends_its_own_children_and_nobody_elses(play: Play) -> None:
    code = """
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

    async def scenario(client: Client) -> None:
        assert await printed_by(client, code) == "-15\n"

    play(scenario, namespaces="off")
    play(scenario)

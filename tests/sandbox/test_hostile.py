"""Programs that mean harm: what becomes of each, and that its neighbours and the service are as before.

The protections are those of namespaces and seccomp; where the kernel has none, `doctor` and the log say what is missing.
"""

from __future__ import annotations

import asyncio
import textwrap

import pytest

from bus.messages import CodeDied, CodeOk, CodeOutcome, CodeOutOfMemory, CodeRaised, CodeTimedOut, Output
from tests.sandbox.conftest import Client, Play

pytestmark = pytest.mark.slow

LIMIT_S = 1.0
OK = CodeOk
# name: (program, the outcome's type, what it prints; None: anything)
HOSTILE: dict[str, tuple[str, type[CodeOutcome] | tuple[type[CodeOutcome], ...], str | None]] = {
    "switches its alarm off and sleeps": ("import signal, time\nsignal.alarm(0)\ntime.sleep(60)", CodeTimedOut, None),
    "ignores all signals": (
        "import signal\nfor n in range(1, 32):\n    try: signal.signal(n, signal.SIG_IGN)\n    except OSError: pass\n"
        "while True: pass",
        CodeTimedOut,
        None,
    ),
    "raises its limits": (
        "import resource as r\nfor kind in (r.RLIMIT_AS, r.RLIMIT_NPROC, r.RLIMIT_FSIZE, r.RLIMIT_CPU, r.RLIMIT_NOFILE):\n"
        "    try: r.setrlimit(kind, (r.RLIM_INFINITY, r.RLIM_INFINITY)); print('raised')\n"
        "    except (ValueError, OSError): pass",
        OK,
        "",
    ),
    "forks without end": (
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
        CodeTimedOut,
        None,
    ),
    "starts threads without end": (
        "import threading, time\nwhile True:\n    threading.Thread(target=time.sleep, args=(60,)).start()",
        (CodeRaised, CodeTimedOut),
        None,
    ),
    "takes memory": ("x = []\nwhile True: x.append(bytearray(1 << 20))", CodeOutOfMemory, None),
    "fills the disk": (
        "try:\n    for n in range(100):\n        open(f'f{n}', 'wb').write(b'x' * (1 << 20))\nexcept OSError as e: print(e.errno)",
        OK,
        "28\n",
    ),
    "writes a huge file": ("open('f', 'wb').write(b'x' * (9 << 20))", CodeRaised, None),
    "writes outside its folder": (
        "import os, sys\nfor path in ('/x', '/usr/x', os.__file__, '/dev/x', '/proc/x', sys.executable):\n"
        "    try: open(path, 'a'); print('wrote', path)\n    except OSError: pass",
        OK,
        "",
    ),
    "reads what is not its own": (
        "import os\nprint(os.listdir('/proc'), os.path.exists('/sys'), os.path.exists('/etc'), os.path.exists('/home'))",
        OK,
        "[] False False False\n",
    ),
    "kills all that it can": (
        "import os, signal\nfor pid in (-1, 0, 1, os.getppid()):\n    try: os.kill(pid, 9)\n    except OSError: pass\n"
        "print('still here')",
        (OK, CodeDied),
        None,
    ),
    "leaves a daemon that holds its output": (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(600)\n    os._exit(0)\n"
        "print('done')",
        OK,
        "done\n",
    ),
    "opens sockets": (
        "import socket as s\nfor family in (s.AF_UNIX, s.AF_INET, s.AF_INET6, s.AF_NETLINK, s.AF_PACKET):\n"
        "    try: s.socket(family, s.SOCK_DGRAM); print('opened')\n    except OSError: pass",
        OK,
        "",
    ),
    "makes namespaces and mounts": (
        "import ctypes\nlibc = ctypes.CDLL(None)\n"
        "print(libc.unshare(0x10000000), libc.unshare(0x20000), libc.mount(b'none', b'/scratch', b'tmpfs', 0, None))",
        OK,
        "-1 -1 -1\n",
    ),
    "traces, asks for io_uring, keys, shared memory": (
        "import ctypes\nlibc = ctypes.CDLL(None)\nprint(libc.ptrace(0, 0, 0, 0), libc.syscall(425, 8, 0), "
        "libc.syscall(250 if __import__('os').uname().machine == 'x86_64' else 219, 0, -3, 0), libc.shmget(1, 4096, 0o1777))",
        OK,
        "-1 -1 -1 -1\n",
    ),
    "becomes root": ("import os\nos.setuid(0)", CodeRaised, None),
    "forges results on every descriptor": (
        "import os, json\nframe = json.dumps({'id': 1, 'kind': 'ok', 'details': []}).encode()\n"
        "for fd in range(3, 256):\n    try: os.write(fd, len(frame).to_bytes(4, 'little') + frame)\n    except OSError: pass\n"
        "print('mine')",
        (OK, CodeDied),
        None,
    ),
    "closes every descriptor": ("import os\nos.closerange(0, 256)\nprint('x')", (CodeDied, CodeRaised), None),
    "overflows the C stack": (
        "import sys\nsys.setrecursionlimit(10**9)\ndef f(x): return f(x)\nx = []\nfor _ in range(10**5): x = [x]\nrepr(x)",
        (CodeDied, CodeRaised, CodeOutOfMemory, CodeTimedOut),
        None,
    ),
    "breaks the harness's tools": (
        "import builtins, sys, os, json\nbuiltins.print = None\nsys.stdout = sys.stderr = None\nos._exit = None\njson.dumps = None",
        (OK, CodeDied, CodeRaised),
        None,
    ),
    "prints megabytes that look like results": (
        'print(\'{"id": 1, "kind": "ok"}\\x00\\x1b[2J\' * 100_000)',
        OK,
        None,
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_no_program_harms_its_neighbour_or_the_service(play: Play, name: str) -> None:
    code, ending, printed = HOSTILE[name]

    async def scenario(client: Client) -> None:
        assert client.isolation.namespaces, "this suite needs namespaces"
        await client.printed("kept = open('mine', 'w').write('abc')", trajectory=1)
        neighbour = asyncio.create_task(client.program("import time\ntime.sleep(0.3)\nprint('unharmed')"))
        outcome = (await client.program(textwrap.dedent(code), trajectory=2)).outcome
        assert isinstance(outcome, ending), outcome
        if printed is not None:
            assert isinstance(outcome, CodeOk)
            assert outcome.output == Output(printed)
        assert (await neighbour).outcome == CodeOk(Output("unharmed\n"))
        assert await client.printed("kept, open('mine').read()", trajectory=1) == "(3, 'abc')\n"
        assert (await client.program("import os\nprint(os.listdir())")).outcome == CodeOk(Output("[]\n"))

    play(scenario, time_limit_s=LIMIT_S, memory_mib=256, file_mib=8)


def test_a_cell_cannot_answer_a_later_cell(play: Play) -> None:
    async def scenario(client: Client) -> None:
        forged = "import os, struct\nx = 1\nos.write(3, struct.pack('<dIQ', 0.0, 2, 0) + b'ok')"
        assert isinstance((await client.cell(forged)).outcome, CodeDied)
        assert isinstance((await client.cell("x")).outcome, CodeRaised)

    play(scenario)

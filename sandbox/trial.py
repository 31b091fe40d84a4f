"""Does the sandbox hold? Programs that try what executed code must not be able to do, and what came of each.

`asterism sandbox doctor` runs them on the very backend that a run would get; tests/sandbox/hostile has many more.
"""

from __future__ import annotations

import asyncio

import msgspec

from bus.messages import CodeDied, CodeOk, CodeOutcome, CodeOutOfMemory, CodeRaised, CodeRequested, CodeTimedOut
from sandbox.contract import Sandbox


class Attempt(msgspec.Struct, frozen=True):
    name: str
    code: str  # prints "through" if it got through


class Finding(msgspec.Struct, frozen=True):
    name: str
    held: bool
    detail: str


_OR_STOPPED = "\nexcept BaseException as error:\n    print(type(error).__name__, error)\nelse:\n    print('through')"
ATTEMPTS = tuple(
    Attempt(name, "try:\n" + "\n".join(f"    {line}" for line in code.splitlines()) + _OR_STOPPED)
    for name, code in {
        "reach the network": "import socket\nsocket.socket(socket.AF_INET, socket.SOCK_STREAM).connect(('1.1.1.1', 53))",
        "read the machine's files": "open('/etc/shadow').read()",
        "read another process's environment": "open('/proc/1/environ').read()",
        "write outside its folder": "open('/usr/asterism-was-here', 'w').write('x')",
        "signal what it did not start": "import os\nos.kill(os.getppid() or 2, 9)",
        "mount a file system": "import ctypes\nlibc = ctypes.CDLL(None)\n"
        "assert libc.mount(b'none', b'/scratch', b'tmpfs', 0, None) == 0, 'refused'",
        "make a namespace": "import ctypes\nassert ctypes.CDLL(None).unshare(0x10000000) == 0, 'refused'",
        "trace a process": "import ctypes\nassert ctypes.CDLL(None).ptrace(0, 0, 0, 0) == 0, 'refused'",
        "become another user": "import os\nos.setuid(0)\nassert os.getuid() == 0, 'refused'",
        "raise its limits": "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
        "take all memory": "blocks = []\nwhile True: blocks.append(bytearray(1 << 24))",
        "fill the disk": "with open('file', 'wb') as file:\n    for _ in range(4096): file.write(bytes(1 << 20))",
        "start processes without end": "import os\nfor _ in range(10_000):\n    if os.fork() == 0: os.pause() if hasattr(os, 'pause') else __import__('time').sleep(60)",
        "run for ever": "while True: pass",
    }.items()
)


async def try_out(sandbox: Sandbox) -> list[Finding]:
    """Each attempt at once with all others; the last finding is a neighbour's notebook that they must not disturb.

    Raises SandboxFailure if the infrastructure itself gave way.
    """
    neighbour = len(ATTEMPTS)
    await sandbox.run(CodeRequested(neighbour, 0, "jupyter_code", "kept = 41", ""))
    calls = [
        CodeRequested(number, 0, "python_code_with_standard_io", attempt.code, "")
        for number, attempt in enumerate(ATTEMPTS)
    ]
    results = await asyncio.gather(*[sandbox.run(call) for call in calls])
    findings = [_finding(attempt, result.outcome) for attempt, result in zip(ATTEMPTS, results, strict=True)]
    kept = await sandbox.run(CodeRequested(neighbour, 1, "jupyter_code", "kept + 1", ""))
    await sandbox.end_session(neighbour)
    unharmed = isinstance(kept.outcome, CodeOk) and kept.outcome.output.stdout == "42\n"
    return [*findings, Finding("disturb a neighbour", unharmed, "unharmed" if unharmed else str(kept.outcome))]


def _finding(attempt: Attempt, outcome: CodeOutcome) -> Finding:
    match outcome:
        case CodeOk(output=output):
            said = output.stdout.strip()
            return Finding(attempt.name, not said.endswith("through"), said[:100])
        case CodeTimedOut(limit_s=limit_s):
            return Finding(attempt.name, True, f"ended after {limit_s:g} s")
        case CodeOutOfMemory(limit_mib=limit_mib):
            return Finding(attempt.name, True, f"ended beyond {limit_mib} MiB")
        case CodeDied(exit_code=code):
            return Finding(attempt.name, True, f"ended with exit code {code}")
        case CodeRaised(error=error):
            return Finding(attempt.name, True, error[:100])
        case _:
            return Finding(attempt.name, False, str(outcome)[:100])

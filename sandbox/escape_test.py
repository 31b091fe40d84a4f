"""Runs programs that attempt forbidden actions in a sandbox, and reports which ones it contains.

`asterism sandbox doctor` runs them on the configured backend; tests/sandbox/hostile has many more programs.
"""

import asyncio

import msgspec

from asterism.bus.messages import (
    CodeCrashed,
    CodeOk,
    CodeOutcome,
    CodeOutOfMemory,
    CodeRaised,
    CodeRequested,
    CodeTimedOut,
)
from asterism.sandbox.contract import Sandbox


class EscapeAttempt(msgspec.Struct, frozen=True):
    name: str
    code: str  # prints "through" if the attempt succeeds


class EscapeFinding(msgspec.Struct, frozen=True):
    name: str
    contained: bool
    detail: str


_ATTEMPT_SUFFIX = (
    "\nexcept BaseException as error:\n    print(str(error) or type(error).__name__)\nelse:\n    print('through')"
)
ESCAPE_ATTEMPTS = tuple(
    EscapeAttempt(name, "try:\n" + "\n".join(f"    {line}" for line in code.splitlines()) + _ATTEMPT_SUFFIX)
    for name, code in {
        "reach the network": "import socket\nsocket.socket(socket.AF_INET, socket.SOCK_STREAM).connect(('1.1.1.1', 53))",
        "read the machine's files": "open('/etc/shadow').read()",
        "read another process's environment": "open('/proc/1/environ').read()",
        "write outside its folder": "open('/usr/asterism-was-here', 'w').write('x')",
        "signal a process that it did not start": "import os\nos.kill(os.getppid() or 2, 9)",
        "mount a file system": "import ctypes\nlibc = ctypes.CDLL(None)\n"
        "if libc.mount(b'none', b'/scratch', b'tmpfs', 0, None): raise OSError('refused')",
        "make a namespace": "import ctypes\nif ctypes.CDLL(None).unshare(0x10000000): raise OSError('refused')",
        "trace a process": "import ctypes\nif ctypes.CDLL(None).ptrace(0, 0, 0, 0): raise OSError('refused')",
        "become another user": "import os\nos.setuid(0)\nif os.getuid(): raise OSError('refused')",
        "raise its limits": "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
        "take all memory": "blocks = []\nwhile True: blocks.append(bytearray(1 << 24))",
        "fill the disk": "with open('file', 'wb') as file:\n    for _ in range(4096): file.write(bytes(1 << 20))",
        "start processes without end": "import os\nfor _ in range(10_000):\n    if os.fork() == 0: os.pause() if hasattr(os, 'pause') else __import__('time').sleep(60)",
        "run for ever": "while True: pass",
    }.items()
)


async def run_escape_attempts(sandbox: Sandbox) -> list[EscapeFinding]:
    """Run all attempts. The last finding is whether a neighbour's notebook is intact. Raises SandboxFailure."""
    neighbour = len(ESCAPE_ATTEMPTS)
    await sandbox.run(CodeRequested(neighbour, 0, "jupyter_code", "value = 41", ""))
    calls = [
        CodeRequested(number, 0, "python_code_with_standard_io", attempt.code, "")
        for number, attempt in enumerate(ESCAPE_ATTEMPTS)
    ]
    results = await asyncio.gather(*[sandbox.run(call) for call in calls])
    findings = [
        _judge_attempt(attempt, result.outcome) for attempt, result in zip(ESCAPE_ATTEMPTS, results, strict=True)
    ]
    outcome = (await sandbox.run(CodeRequested(neighbour, 1, "jupyter_code", "value + 1", ""))).outcome
    await sandbox.end_notebook(neighbour)
    intact = isinstance(outcome, CodeOk) and outcome.output.stdout == "42\n"
    return [*findings, EscapeFinding("disturb a neighbour", intact, "intact" if intact else str(outcome))]


def _judge_attempt(attempt: EscapeAttempt, outcome: CodeOutcome) -> EscapeFinding:
    match outcome:
        case CodeOk(output=output):
            text = output.stdout.strip()
            return EscapeFinding(attempt.name, not text.endswith("through"), text[:100])
        case CodeTimedOut(limit_s=limit_s):
            return EscapeFinding(attempt.name, True, f"ended after {limit_s:g} s")
        case CodeOutOfMemory(limit_mib=limit_mib):
            return EscapeFinding(attempt.name, True, f"ended beyond {limit_mib} MiB")
        case CodeCrashed(exit_code=code):
            return EscapeFinding(attempt.name, True, f"ended with exit code {code}")
        case CodeRaised(error=error):
            return EscapeFinding(attempt.name, True, error[:100])
        case _:
            return EscapeFinding(attempt.name, False, str(outcome)[:100])

"""The process in which a call, or a session's calls, run: what it gives up first, and how it is spoken to.

Standard library only. It is forked ahead of its first call, isolates itself, and waits. In a pid namespace it is
process 1, so that the kernel ends all that it started together with it; a process 1 ignores signals whose action is the
default one when they come from inside, so `os.kill(os.getpid(), 9)` has no effect there.

Descriptors: 0 nothing or the call's standard input, 1 and 2 pipes, 3 the socket to the fork server, and no other.
"""

import math
import os
import random
import resource
import signal
import struct
import sys
import time
from typing import Any, NamedTuple, NoReturn

from sandbox.inside import kernel, program
from sandbox.inside.landlock import Landlock
from sandbox.inside.namespaces import SCRATCH
from sandbox.inside.seccomp import Filter
from sandbox.inside.settings import Settings

_CONTROL = 3
_SESSION_CPU_CELLS = 64  # a session's whole CPU time, in time limits: the kernel's limit cannot be raised for a cell
_OPEN_FILES = 256
_PENDING_SIGNALS = 256  # timers included
_BROKEN = 70  # exit code of a process whose socket the code broke
MIB = 1 << 20
_CALL = struct.Struct("<BQQII")  # kind, seed, nonce, bytes of the code, bytes of the input
STARTED = struct.Struct("<d")  # monotonic time at which the code began, sent ahead of the answer
_ANSWER = struct.Struct("<IQ")  # bytes of the outcome's text, nonce
_PROGRAM, _CELL = 0, 1


class Isolating(NamedTuple):
    """What the fork server found to be possible here."""

    settings: Settings
    proc: int | None  # a descriptor of /proc
    scratch_options: str  # of a call's own file system
    max_processes: int  # of a call's user, threads included
    landlock: Landlock | None
    ruleset: int | None  # of `landlock`, that let this call change its own folder
    filter: Filter | None
    own_namespaces: bool
    unprivileged_id: int | None  # user and group that each call takes, where root has no namespaces


def run(control: int, stdout: int, stderr: int, folder: str | None, how: Isolating) -> NoReturn:
    """The life of a forked process. `folder` is its private folder where it cannot mount one."""
    try:
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        _isolate(control, folder, how)
        _prepare_interpreter()
        _serve(how.settings)
    except BaseException:  # nothing may return into the fork server's own loop
        os._exit(_BROKEN)


def _isolate(control: int, folder: str | None, how: Isolating) -> None:
    """Few steps, because each costs copies of the interpreter's pages: the rest is inherited from the fork server."""
    os.setsid()
    if how.own_namespaces:
        kernel.unshare(kernel.CLONE_NEWNS)
        kernel.mount("tmpfs", SCRATCH, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, how.scratch_options)
        os.chdir(SCRATCH)
        kernel.unshare(kernel.CLONE_NEWUSER)  # the kernel counts processes by user namespace
    elif folder is not None:
        _take_folder(folder, how)
    kernel.drop_capabilities()
    _limit(resource.RLIMIT_NPROC, how.max_processes)
    _limit(resource.RLIMIT_NOFILE, _OPEN_FILES)
    if how.landlock is not None and how.ruleset is not None:
        how.landlock.take_on(how.ruleset)  # after the mounts, which it forbids
    os.dup2(control, _CONTROL)
    kernel.close_all_from(_CONTROL + 1)
    if how.filter is not None:
        how.filter.install()


def _take_folder(folder: str, how: Isolating) -> None:
    os.chdir(folder)
    os.environ["HOME"] = os.environ["TMPDIR"] = folder
    if how.unprivileged_id is not None:
        os.setgroups([])
        os.setresgid(*[how.unprivileged_id] * 3)
        os.setresuid(*[how.unprivileged_id] * 3)
    kernel.die_with_parent(signal.SIGKILL)  # in a pid namespace the fork server's end is the end of all


def limit_for_all_calls(settings: Settings, mapped_bytes: int) -> None:
    """What a fork server puts on itself and its calls inherit. `mapped_bytes` is its own address space."""
    _limit(resource.RLIMIT_AS, mapped_bytes + settings.memory_mib * MIB)
    _limit(resource.RLIMIT_FSIZE, settings.file_mib * MIB)
    for kind in (resource.RLIMIT_CORE, resource.RLIMIT_MEMLOCK, resource.RLIMIT_MSGQUEUE):
        _limit(kind, 0)
    _limit(resource.RLIMIT_SIGPENDING, _PENDING_SIGNALS)
    kernel.no_new_privileges()


def _limit(kind: int, value: int) -> None:
    resource.setrlimit(kind, (value, value))


def _prepare_interpreter() -> None:
    sys.path.insert(0, "")
    sys.argv = [""]


# ---------------------------------------------------------------- calls


class Call(NamedTuple):
    is_cell: bool
    seed: int
    nonce: int
    code: str
    stdin: bytes


def call_bytes(is_cell: bool, seed: int, nonce: int, code: str, stdin: str) -> bytes:
    """A call as the forked process reads it: no JSON, whose machinery would cost it page copies."""
    code_utf8, stdin_utf8 = code.encode("utf-8", "replace"), stdin.encode("utf-8", "backslashreplace")
    kind = _CELL if is_cell else _PROGRAM
    return _CALL.pack(kind, seed, nonce, len(code_utf8), len(stdin_utf8)) + code_utf8 + stdin_utf8


def read_answer(received: bytes) -> tuple[int, list[str]] | None:
    """(nonce, outcome) once it is complete. Raises ValueError if it is more than one answer."""
    received = received[STARTED.size :]
    if len(received) < _ANSWER.size:
        return None
    length, nonce = _ANSWER.unpack_from(received)
    if len(received) > _ANSWER.size + length:
        raise ValueError("more than one answer")
    if len(received) < _ANSWER.size + length:
        return None
    return nonce, received[_ANSWER.size :].decode("utf-8", "replace").split("\0")


def _serve(settings: Settings) -> NoReturn:
    main, own_pid = program.fresh_main(), os.getpid()
    while True:
        call = _read_call()
        _begin(call, settings)
        os.write(_CONTROL, STARTED.pack(time.monotonic()))
        run_code = program.run_cell if call.is_cell else program.run_program
        outcome = run_code(call.code, main)
        if os.getpid() != own_pid:
            _end_of_a_fork(outcome)
        _answer(outcome, call.nonce)
        if outcome[0] == "exit" or not call.is_cell:
            program.end_process(int(outcome[1]) if outcome[0] == "exit" else 0)


def _end_of_a_fork(outcome: program.Outcome) -> NoReturn:
    """The code forked, and its child has come to the end of the code: it ends as a Python program would."""
    if outcome[0] == "raised":
        os.write(2, f"{outcome[2]}\n".encode("utf-8", "backslashreplace"))
    code = {"ok": 0, "exit": int(outcome[1]) if outcome[0] == "exit" else 0}.get(outcome[0], 1)
    program.end_process(code)


def _begin(call: Call, settings: Settings) -> None:
    cpu_s = math.ceil(settings.time_limit_s) + 1
    if call.is_cell:
        cpu_s *= _SESSION_CPU_CELLS
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    if hard == resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    if call.stdin:
        fd = _unnamed_file()
        os.write(fd, call.stdin)
        os.lseek(fd, 0, os.SEEK_SET)
        os.dup2(fd, 0)
        os.close(fd)
    _seed(call.seed)


def _unnamed_file() -> int:
    """A file in the call's folder that nothing can open. In memory of its own it would not count as the folder's."""
    try:
        return os.open(".", os.O_TMPFILE | os.O_RDWR)
    except OSError:  # not every file system can
        fd = os.open(".stdin", os.O_CREAT | os.O_EXCL | os.O_RDWR)
        os.remove(".stdin")  # noqa: PTH107
        return fd


def _seed(seed: int) -> None:
    random.seed(seed)
    numpy: Any = sys.modules.get("numpy")
    sympy: Any = sys.modules.get("sympy")
    if numpy is not None:
        numpy.random.seed(seed & 0xFFFF_FFFF)
    if sympy is not None:
        sympy.core.random.seed(seed)


def _read_call() -> Call:
    kind, seed, nonce, code_bytes, stdin_bytes = _CALL.unpack(_read(_CALL.size))
    return Call(kind == _CELL, seed, nonce, _read(code_bytes).decode("utf-8", "replace"), _read(stdin_bytes))


def _read(length: int) -> bytes:
    chunks: list[bytes] = []
    while length:
        chunk = os.read(_CONTROL, min(length, 1 << 20))
        if not chunk:
            os._exit(0)  # the fork server let go of this process
        chunks.append(chunk)
        length -= len(chunk)
    return b"".join(chunks)


def _answer(outcome: program.Outcome, nonce: int) -> None:
    """With the call's nonce, so that code that wrote to the socket ahead of time has not answered a later call."""
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        try:
            if stream is not None:
                stream.flush()
        except BaseException:
            continue
    text = "\0".join(outcome).encode("utf-8", "backslashreplace")
    answer = _ANSWER.pack(len(text), nonce) + text
    while answer:
        answer = answer[os.write(_CONTROL, answer) :]

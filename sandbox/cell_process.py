"""The process in which a call, or a session's calls, run: what it gives up first, and how it is spoken to.

Standard library only. It is forked ahead of its first call, isolates itself, and waits. In a pid namespace it is
process 1, so that the kernel ends all that it started together with it; a process 1 ignores signals whose action is the
default one when they come from inside, so `os.kill(os.getpid(), 9)` has no effect there.

Descriptors: 0 nothing or the call's standard input, 1 and 2 pipes, 3 the socket to the fork server, and no other.
"""

import json
import math
import os
import random
import resource
import signal
import sys
from typing import Any, NamedTuple, NoReturn

from sandbox import kernel, program
from sandbox.frames import LENGTH, Frame, encode
from sandbox.namespaces import SCRATCH
from sandbox.seccomp import Filter
from sandbox.settings import Settings

_CONTROL = 3
_SESSION_CPU_CELLS = 64  # a session's whole CPU time, in time limits: the kernel's limit cannot be raised for a cell
_BROKEN = 70  # exit code of a process whose socket the code broke
MIB = 1 << 20


class Isolating(NamedTuple):
    """What the fork server found to be possible here."""

    settings: Settings
    proc: int | None  # a descriptor of /proc
    mapped_bytes: int  # address space of the fork server itself
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
    if how.proc is not None:
        _offer_to_the_kernel_first(how.proc)
    os.dup2(control, _CONTROL)
    kernel.close_all_from(_CONTROL + 1)
    os.setsid()
    if how.own_namespaces:
        kernel.unshare(kernel.CLONE_NEWNS)
        size = f"size={how.settings.file_mib}m,nr_inodes=4096,mode=700"
        kernel.mount("tmpfs", SCRATCH, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, size)
        os.chdir(SCRATCH)
        kernel.unshare(kernel.CLONE_NEWUSER)  # the kernel counts processes by user namespace
    elif folder is not None:
        os.chdir(folder)
        os.environ["HOME"] = os.environ["TMPDIR"] = folder
    if how.unprivileged_id is not None:
        os.setgroups([])
        os.setresgid(*[how.unprivileged_id] * 3)
        os.setresuid(*[how.unprivileged_id] * 3)
    kernel.no_new_privileges()
    kernel.drop_capabilities()
    _limit(how)
    if how.filter is not None:
        how.filter.install()
    kernel.die_with_parent(signal.SIGKILL)


def _offer_to_the_kernel_first(proc: int) -> None:
    """When memory runs out, the kernel ends this process before the fork server or the training."""
    try:
        fd = os.open("self/oom_score_adj", os.O_WRONLY, dir_fd=proc)
        os.write(fd, b"1000")
        os.close(fd)
    except OSError:
        pass


def _limit(how: Isolating) -> None:
    settings = how.settings
    limits = {
        resource.RLIMIT_AS: how.mapped_bytes + settings.memory_mib * MIB,
        resource.RLIMIT_FSIZE: settings.file_mib * MIB,
        resource.RLIMIT_NOFILE: 256,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    if how.own_namespaces or how.unprivileged_id is not None:
        limits[resource.RLIMIT_NPROC] = settings.max_processes
    for kind, value in limits.items():
        resource.setrlimit(kind, (value, value))


def _prepare_interpreter() -> None:
    for name in [name for name in sys.modules if name == "sandbox" or name.startswith("sandbox.")]:
        del sys.modules[name]
    sys.path.insert(0, "")
    sys.argv = [""]


# ---------------------------------------------------------------- calls


def _serve(settings: Settings) -> NoReturn:
    main = program.fresh_main()
    while True:
        call = _read_call()
        _begin(call, settings)
        if call["op"] == "run":
            outcome = program.run_program(call["code"], main)
            _answer(outcome, call["nonce"])
            program.end_process(0)
        outcome = program.run_cell(call["code"], main)
        if outcome["kind"] == "exit":
            _answer(outcome, call["nonce"])
            program.end_process(outcome["code"])
        _answer(outcome, call["nonce"])


def _begin(call: Frame, settings: Settings) -> None:
    cpu_s = math.ceil(settings.time_limit_s) + 1
    if call["op"] == "cell":
        cpu_s *= _SESSION_CPU_CELLS
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    if hard == resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    if call["stdin"]:
        fd = os.memfd_create("stdin")
        os.write(fd, call["stdin"].encode("utf-8", "backslashreplace"))
        os.lseek(fd, 0, os.SEEK_SET)
        os.dup2(fd, 0)
        os.close(fd)
    if call["seed"] is not None:
        _seed(call["seed"])


def _seed(seed: int) -> None:
    random.seed(seed)
    modules: dict[str, Any] = dict(sys.modules)
    if "numpy" in modules:
        modules["numpy"].random.seed(seed & 0xFFFF_FFFF)
    if "sympy" in modules:
        modules["sympy"].core.random.seed(seed)


def _read_call() -> Frame:
    (length,) = LENGTH.unpack(_read(LENGTH.size))
    return json.loads(_read(length))


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
    frame = memoryview(encode({**outcome, "nonce": nonce}))
    while frame:
        frame = frame[os.write(_CONTROL, frame) :]

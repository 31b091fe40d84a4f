"""The process in which a call, or a session's calls, run: what it gives up first, and how it is spoken to.

Standard library only. It is forked ahead of its first call, isolates itself, and waits. In a pid namespace it is
process 1, so that the kernel ends all that it started together with it; a process 1 ignores signals whose action is the
default one when they come from inside, so a program's `os.kill(os.getpid(), 9)` has no effect there. A session's cells
run in children of it (`session_process`).

Descriptors: 0 nothing or the call's standard input, 1 and 2 pipes, 3 the socket to the fork server, and no other.
"""

import os
import resource
import signal
import sys
from typing import NamedTuple, NoReturn

from sandbox.inside import kernel, program
from sandbox.inside.call_start import begin
from sandbox.inside.calls import CONTROL, read_call, say_answer, say_started
from sandbox.inside.landlock import Landlock
from sandbox.inside.namespaces import SCRATCH
from sandbox.inside.seccomp import Filter
from sandbox.inside.session_process import SPARE_PROCESSES, SessionProcess
from sandbox.inside.settings import Settings

_OPEN_FILES = 256
_PENDING_SIGNALS = 256  # timers included
_BROKEN = 70  # exit code of a process whose socket the code broke
MIB = 1 << 20


class Isolating(NamedTuple):
    """What the fork server found to be possible here."""

    settings: Settings
    proc: int  # a descriptor of /proc
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
        _serve(how)
    except BaseException:  # nothing may return into the fork server's own loop
        os._exit(_BROKEN)


def _isolate(control: int, folder: str | None, how: Isolating) -> None:
    """Few steps, because each costs copies of the interpreter's pages: the rest is inherited from the fork server."""
    os.setpgid(0, 0)  # not a session: the kernel may give each of those a share of its own, whatever its priority
    if how.own_namespaces:
        kernel.unshare(kernel.CLONE_NEWNS)
        kernel.mount("tmpfs", SCRATCH, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, how.scratch_options)
        os.chdir(SCRATCH)
        kernel.unshare(kernel.CLONE_NEWUSER)  # the kernel counts processes by user namespace
    elif folder is not None:
        _take_folder(folder, how)
    kernel.drop_capabilities()
    _limit(resource.RLIMIT_NPROC, how.max_processes + SPARE_PROCESSES)
    _limit(resource.RLIMIT_NOFILE, _OPEN_FILES)
    if how.landlock is not None and how.ruleset is not None:
        how.landlock.take_on(how.ruleset)  # after the mounts, which it forbids
    os.dup2(control, CONTROL)
    kernel.close_all_from(CONTROL + 1)
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


def _serve(how: Isolating) -> NoReturn:
    """The first call decides: a program is the only one; a cell is the first of a session's."""
    call = read_call()
    main = program.fresh_main()
    if call.is_cell:
        SessionProcess(how.settings, how.own_namespaces, main).serve(call)
    own_pid = os.getpid()
    begin(call, how.settings)
    say_started()
    outcome = program.run_program(call.code, main)
    if os.getpid() != own_pid:
        program.end_of_a_fork(outcome)
    program.flush()
    say_answer(outcome, call.nonce)
    program.end_process(int(outcome[1]) if outcome[0] == "exit" else 0)

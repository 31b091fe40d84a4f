"""The process of a program, or the first process of a notebook.

It is forked ahead of its first call. In a pid namespace it is process 1: the kernel kills its
descendants when it ends, and ignores signals from inside for which it has no handler, so that
`os.kill(os.getpid(), 9)` in a program has no effect. A notebook's cells run in children
(asterism.sandbox.inside.call.notebook_process).

Descriptors: 0 is empty or the call's standard input, 1 and 2 are pipes, and 3 is the socket to the
fork server. The process has no other descriptors.
"""

import mmap
import os
import resource
import signal
import sys
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from asterism.sandbox.inside.call import run_code
from asterism.sandbox.inside.call.call_setup import set_up_call
from asterism.sandbox.inside.call.notebook_process import HARNESS_PROCESSES, SHARED_STATE_BYTES, NotebookProcess
from asterism.sandbox.inside.isolation import syscalls
from asterism.sandbox.inside.isolation.landlock import LandlockRules
from asterism.sandbox.inside.isolation.namespaces import SCRATCH, mount_scratch
from asterism.sandbox.inside.isolation.seccomp import SeccompFilter
from asterism.sandbox.inside.wire.call_wire import CONTROL_FD, read_call, write_answer, write_started
from asterism.sandbox.inside.wire.server_settings import ServerSettings

_MAX_OPEN_FILES = 256  # plus one per MiB of memory, because a descriptor can hold 208 KiB of a socket's buffer
_MAX_PENDING_SIGNALS = 128  # timers count as signals
_BROKEN_EXIT_CODE = 70  # the code broke the socket or the harness
MIB = 1 << 20


class CallIsolation(NamedTuple):
    """The isolation that the fork server found available."""

    settings: ServerSettings
    proc_fd: int  # a descriptor of /proc
    scratch_options: str  # mount options of a call's tmpfs
    max_processes: int  # limit for a call's user; threads count
    landlock: LandlockRules | None
    ruleset: int | None  # descriptor: `landlock` plus write access to this call's folder
    seccomp_filter: SeccompFilter | None
    own_namespaces: bool
    own_users: bool  # each call has a kernel user of its own
    mounts_in_tmp: tuple[str, ...] = ()  # see EnteredNamespaces
    user: int | None = None  # user of this call


def run_call_process(
    fds: Sequence[int], folder: str | None, isolation: CallIsolation, *, is_notebook: bool
) -> NoReturn:
    """Run the process. `folder` is the private folder of a process that cannot mount one.

    With `is_notebook`, the process forks the notebook's worker now. Otherwise, the kind of its first call decides.

    `fds`: control, stdout, stderr, and the list of members of a cgroup, which this process joins.
    """
    try:
        control, stdout, stderr, *cgroup = fds
        for members in cgroup:
            os.write(members, b"0")
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        shared = mmap.mmap(-1, SHARED_STATE_BYTES)  # mapped now, because the call's filter forbids shared memory
        _isolate(control, folder, isolation)
        sys.path.insert(0, "")
        sys.argv = [""]
        _serve(isolation, shared, is_notebook=is_notebook)
    except BaseException:  # must not return into the zygote's loop
        os._exit(_BROKEN_EXIT_CODE)


def _isolate(control: int, folder: str | None, isolation: CallIsolation) -> None:
    """Isolate this process in few steps, because each step copies pages. Most isolation is inherited."""
    os.setpgid(0, 0)  # not setsid: autogrouping would give the session its own CPU share
    if isolation.own_namespaces:
        if isolation.user is not None:  # first, because this user becomes the owner of the folder
            os.setresuid(isolation.user, isolation.user, isolation.user)
            syscalls.make_dumpable()  # otherwise, /proc hides this process from the fork server
        syscalls.unshare(syscalls.CLONE_NEWNS)
        mount_scratch(isolation.scratch_options, isolation.mounts_in_tmp)
        os.chdir(SCRATCH)
        syscalls.unshare(syscalls.CLONE_NEWUSER)  # the kernel counts processes by user namespace
    elif folder is not None:
        _enter_folder(folder, isolation)
    syscalls.drop_capabilities()
    _set_limit(resource.RLIMIT_NPROC, isolation.max_processes + HARNESS_PROCESSES)
    # After the new user namespace: otherwise, the kernel applies this limit to all calls of the user together.
    _set_limit(resource.RLIMIT_SIGPENDING, _MAX_PENDING_SIGNALS)
    _set_limit(resource.RLIMIT_NOFILE, min(_MAX_OPEN_FILES, max(32, isolation.settings.memory_mib)))
    if isolation.landlock is not None and isolation.ruleset is not None:
        isolation.landlock.restrict_self(isolation.ruleset)  # after the mounts, which the rules forbid
    os.dup2(control, CONTROL_FD)
    syscalls.close_all_from(CONTROL_FD + 1)
    if isolation.seccomp_filter is not None:
        isolation.seccomp_filter.install()


def _enter_folder(folder: str, isolation: CallIsolation) -> None:
    os.chdir(folder)
    os.environ["HOME"] = os.environ["TMPDIR"] = folder
    if isolation.user is not None:
        os.setgroups([])
        os.setresgid(isolation.user, isolation.user, isolation.user)
        os.setresuid(isolation.user, isolation.user, isolation.user)
    syscalls.die_with_parent(signal.SIGKILL)  # a pid namespace has the same effect


def set_shared_limits(settings: ServerSettings, mapped_bytes: int) -> None:
    """Set the limits that calls inherit. `mapped_bytes` is the zygote's address space."""
    _set_limit(resource.RLIMIT_AS, mapped_bytes + settings.memory_mib * MIB)
    _set_limit(resource.RLIMIT_FSIZE, settings.file_mib * MIB)
    for kind in (resource.RLIMIT_CORE, resource.RLIMIT_MEMLOCK, resource.RLIMIT_MSGQUEUE):
        _set_limit(kind, 0)
    syscalls.set_no_new_privileges()


def _set_limit(kind: int, value: int) -> None:
    """Set a limit, but keep a lower limit of the machine."""
    _, hard = resource.getrlimit(kind)
    limit = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (limit, limit))


def _serve(isolation: CallIsolation, shared: mmap.mmap, *, is_notebook: bool) -> NoReturn:
    call = None if is_notebook else read_call()
    main = run_code.make_main_module()
    if call is None or call.is_cell:
        NotebookProcess(isolation.settings, isolation.own_namespaces, main, shared).serve(call)
    shared.close()
    own_pid = os.getpid()
    set_up_call(call, isolation.settings)
    write_started()
    outcome = run_code.run_program(call.code, main)
    if os.getpid() != own_pid:
        run_code.exit_forked_child(outcome)
    run_code.flush_all_streams()
    write_answer(outcome, call.nonce)
    run_code.exit_process(int(outcome[1]) if outcome[0] == "exit" else 0)

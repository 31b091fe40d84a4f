"""Starts a fork server: isolation, preloaded modules, the hello frame, then the server's loop.

`asterism.sandbox.hosts.local_host` or `asterism.sandbox.inside.container_init` starts it as the leader of a session.
"""
# pathlib would be mapped into every forked process.
# ruff: noqa: PTH101, PTH116, PTH120, PTH208

import contextlib
import gc
import os
import resource
import signal
import socket
import stat
import sys
from typing import NoReturn

from asterism.sandbox.inside.call import call_process
from asterism.sandbox.inside.call.call_process import CallIsolation
from asterism.sandbox.inside.call.standard_streams import renew_output_objects
from asterism.sandbox.inside.isolation import landlock, namespaces, seccomp, syscalls
from asterism.sandbox.inside.isolation.kernel_users import OfferedUsers, receive_offer
from asterism.sandbox.inside.isolation.landlock import LandlockRules
from asterism.sandbox.inside.server.call_cgroups import can_join, receive_call_cgroups
from asterism.sandbox.inside.server.fork_server import ForkServer
from asterism.sandbox.inside.server.lock_inquiries import hold_devices, start_answering
from asterism.sandbox.inside.server.scratch_folders import remove_folder
from asterism.sandbox.inside.wire.frames import encode_frame
from asterism.sandbox.inside.wire.server_settings import ServerSettings, parse_settings
from asterism.sandbox.inside.zygote.warmup import collapse_written_memory, warm_up
from asterism.sandbox.inside.zygote.zygote import Zygote

# Number of processes that calls and other programs can add if they share one user.
_SHARED_PROCESS_ALLOWANCE = 512


def main() -> NoReturn:
    """Serve until the executor closes the socket. Arguments: settings as JSON, socket descriptor."""
    settings = parse_settings(sys.argv[1])
    os.environ.pop("LD_BIND_NOW", None)
    executor = socket.socket(fileno=int(sys.argv[2]))
    try:
        users = receive_offer(executor) if settings.kernel_users else None
        cgroups = receive_call_cgroups(executor, settings.memory_mib) if settings.call_cgroups else None
        fds = [executor.fileno()] if cgroups is None else [executor.fileno(), cgroups.folder_fd]
        isolation, folder, missing = _isolate(settings, fds, users)
        if cgroups is not None and not can_join(cgroups):
            cgroups = None
        _raise_open_file_limit()
        zygote = Zygote(isolation, fds, lambda: _preload_modules(settings, isolation))
    except (OSError, ImportError) as error:
        executor.sendall(encode_frame({"refused": f"{type(error).__name__}: {error}"}))
        os._exit(1)
    in_force = list(namespaces.NAMESPACE_NAMES) if isolation.own_namespaces else []
    abi = 0 if isolation.landlock is None else isolation.landlock.abi
    executor.sendall(
        encode_frame(
            {
                "hello": settings.preload,
                "namespaces": in_force,
                "landlock": abi,
                "kernel_users": isolation.own_users,
                "call_cgroups": cgroups is not None,
                "missing": missing,
            }
        )
    )
    try:
        server = ForkServer(settings, executor, isolation, zygote, folder, cgroups)
        with contextlib.suppress(ConnectionError):  # the executor closed the socket
            server.serve()
        server.kill_all()
    finally:
        if folder is not None:
            remove_folder(folder)
    os._exit(0)


def _isolate(
    settings: ServerSettings, fds: list[int], users: OfferedUsers | None
) -> tuple[CallIsolation, str | None, list[str]]:
    sys.path[:] = list(settings.import_folders)
    missing: list[str] = []
    folder, mounts_in_tmp = None, ()
    if settings.namespaces:
        visible = [*settings.import_folders, sys.base_prefix]
        proc, has_users, mounts_in_tmp = namespaces.enter_namespaces(visible, fds, users)
        os.environ.update(HOME=namespaces.SCRATCH, TMPDIR=namespaces.SCRATCH)
    else:
        syscalls.die_with_parent(signal.SIGKILL)
        syscalls.become_subreaper()
        proc, has_users = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY), os.getuid() == 0
        folder = _make_private_folder()
        missing += _describe_unreachable_folders(settings)
    syscalls.set_no_new_privileges()
    options = f"size={settings.file_mib}m,nr_inodes=4096,mode=700"
    processes = settings.max_processes
    if not settings.namespaces and os.getuid() != 0:
        processes = _count_own_tasks() + _SHARED_PROCESS_ALLOWANCE
    rules = _build_landlock(settings, missing)
    ruleset = rules.create_ruleset(namespaces.SCRATCH_PARENT) if rules is not None and settings.namespaces else None
    isolation = CallIsolation(
        settings,
        proc,
        options,
        processes,
        rules,
        ruleset,
        _install_filters(missing, proc, fds, own_folders=settings.namespaces),
        settings.namespaces,
        has_users,
        mounts_in_tmp,
    )
    return isolation, folder, missing


def _build_landlock(settings: ServerSettings, missing: list[str]) -> LandlockRules | None:
    """Build the rules. The root of calls is readable; without namespaces, only the necessary folders are readable."""
    try:
        abi = landlock.get_abi_version()
    except OSError as error:
        missing.append(
            f"No Landlock rules ({error.strerror}): use Linux 5.13 or newer with landlock among its lsm= modules, "
            "and let the container's seccomp profile pass landlock_create_ruleset, _add_rule and _restrict_self."
        )
        return None
    needed = (*settings.import_folders, sys.base_prefix, *namespaces.SYSTEM_FOLDERS)
    readable = ("/",) if settings.namespaces else needed
    return LandlockRules(abi, readable, [f"/dev/{name}" for name in namespaces.DEVICES])


def _describe_unreachable_folders(settings: ServerSettings) -> list[str]:
    """List the import folders that calls of root cannot enter, because such calls run as unprivileged users."""
    closed: set[str] = set()
    for folder in settings.import_folders if os.getuid() == 0 else ():
        while folder != "/":
            folder = os.path.dirname(folder)
            if not os.stat(folder).st_mode & stat.S_IXOTH:
                closed.add(folder)
    return [
        f"Executed code cannot import from {folder}, which only root may enter: use an interpreter elsewhere."
        for folder in sorted(closed)
    ]


def _make_private_folder() -> str:
    """Make the parent of the calls' folders, in the executor's folder for temporary files."""
    import tempfile

    folder = tempfile.mkdtemp(prefix="asterism-sandbox-")
    os.chmod(folder, 0o711)
    return folder


def _count_own_tasks() -> int:
    """Count the processes and threads of this user, which share one limit without user namespaces."""
    count = 0
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == os.getuid():
                count += len(os.listdir(f"/proc/{name}/task"))
        except OSError:
            continue  # the process has ended
    return count


def _read_mapped_bytes(isolation: CallIsolation) -> int:
    fd = os.open("self/statm", os.O_RDONLY, dir_fd=isolation.proc_fd)
    try:
        return int(os.read(fd, 256).split()[0]) * os.sysconf("SC_PAGE_SIZE")
    finally:
        os.close(fd)


def _install_filters(
    missing: list[str], proc_fd: int, fds: list[int], *, own_folders: bool
) -> seccomp.SeccompFilter | None:
    """Install the fork server's filter and return the filter of the calls, or None if the kernel refuses."""
    try:
        if own_folders:
            hold_devices()
        listener = seccomp.install_server_filter(own_folders=own_folders)
        if listener is not None:
            start_answering(listener, proc_fd, fds)
    except (OSError, KeyError) as error:
        missing.append(f"No seccomp filter ({error}): use a kernel with CONFIG_SECCOMP_FILTER on x86-64 or arm64.")
        return None
    return seccomp.build_call_filter()


def _raise_open_file_limit() -> None:
    """Raise the limit: a fork server needs four descriptors per call and notebook."""
    _, open_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_files, open_files))


def _preload_modules(settings: ServerSettings, isolation: CallIsolation) -> None:
    """Prepare the zygote: modules, standard output, memory, and limits of the calls."""
    warm_up(settings.preload)
    renew_output_objects()
    for name in [name for name in sys.modules if name.partition(".")[0] == "asterism"]:
        del sys.modules[name]  # in the zygote: in a call, this loop would copy the modules' pages
    gc.collect()
    gc.freeze()
    collapse_written_memory(isolation.proc_fd)
    call_process.set_shared_limits(settings, _read_mapped_bytes(isolation))

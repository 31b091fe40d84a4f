"""How a fork server comes up: isolate, import what calls may need, say hello, serve.

Started by `sandbox.local_host` or `sandbox.inside.keeper`; the arguments are the settings' JSON and the socket's descriptor.
"""
# pathlib would be mapped into every forked process.
# ruff: noqa: PTH101, PTH110, PTH116, PTH120, PTH208

import contextlib
import gc
import os
import resource
import signal
import socket
import stat
import sys
from typing import NoReturn

from sandbox.inside import cell_process, huge_pages, kernel, landlock, namespaces, seccomp
from sandbox.inside.cell_process import Isolating
from sandbox.inside.folders import remove_folder
from sandbox.inside.fork_server import ForkServer
from sandbox.inside.frames import encode
from sandbox.inside.landlock import Landlock
from sandbox.inside.rehearsal import rehearse
from sandbox.inside.settings import Settings, from_json
from sandbox.inside.template import Template

_SHARED_PROCESSES = 512  # that all calls and whatever else this user starts may add, where users cannot be told apart


def main() -> NoReturn:
    """Arguments: the settings' JSON, the socket's descriptor. Ends the process when the executor has gone."""
    settings = from_json(sys.argv[1])
    os.environ.pop("LD_BIND_NOW", None)
    executor = socket.socket(fileno=int(sys.argv[2]))
    try:
        how, folder, missing = _isolate(settings, executor)
        _allow_many_files()
        template = Template(how, [executor.fileno()], lambda: _load(settings, how))
    except (OSError, ImportError) as error:
        executor.sendall(encode({"refused": f"{type(error).__name__}: {error}"}))
        os._exit(1)
    in_force = list(namespaces.NAMES) if how.own_namespaces else []
    abi = 0 if how.landlock is None else how.landlock.abi
    executor.sendall(encode({"hello": settings.flavour, "namespaces": in_force, "landlock": abi, "missing": missing}))
    try:
        server = ForkServer(settings, executor, how, template, folder)
        with contextlib.suppress(ConnectionError):  # the executor has gone while an answer was on its way
            server.serve()
        server.end_all()
    finally:
        if folder is not None:
            remove_folder(folder)
    os._exit(0)


def _isolate(settings: Settings, executor: socket.socket) -> tuple[Isolating, str | None, list[str]]:
    sys.path[:] = list(settings.import_folders)
    os.setsid()  # away from the terminal of whoever started the executor
    missing: list[str] = []
    folder = None
    if settings.namespaces:
        proc = namespaces.enter([*settings.import_folders, sys.base_prefix], [executor.fileno()])
        os.environ.update(HOME=namespaces.SCRATCH, TMPDIR=namespaces.SCRATCH)
    else:
        kernel.die_with_parent(signal.SIGKILL)
        kernel.adopt_orphans()
        proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
        folder = _private_folder()
        missing += _unreachable(settings)
    kernel.no_new_privileges()
    options = f"size={settings.file_mib}m,nr_inodes=4096,mode=700"
    processes = settings.max_processes
    if not settings.namespaces and os.getuid() != 0:
        processes = _own_tasks() + _SHARED_PROCESSES
    rules = _landlock(settings, missing)
    ruleset = rules.ruleset(namespaces.SCRATCH_PARENT) if rules is not None and settings.namespaces else None
    how = Isolating(settings, proc, options, processes, rules, ruleset, _filter(missing), settings.namespaces, None)
    return how, folder, missing


def _landlock(settings: Settings, missing: list[str]) -> Landlock | None:
    """What is readable: the whole of a root that was made for calls, and what they need of the machine's own."""
    try:
        abi = landlock.version()
    except OSError as error:
        missing.append(
            f"No Landlock rules ({error.strerror}): use Linux 5.13 or newer with landlock among its lsm= modules, "
            "and let the container's seccomp profile pass landlock_create_ruleset, _add_rule and _restrict_self."
        )
        return None
    readable = ("/",) if settings.namespaces else _readable_folders(settings)
    return Landlock(abi, readable, [f"/dev/{name}" for name in namespaces.DEVICES])


def _readable_folders(settings: Settings) -> tuple[str, ...]:
    return (*settings.import_folders, sys.base_prefix, *namespaces.SYSTEM_FOLDERS)


def _unreachable(settings: Settings) -> list[str]:
    """Calls of root get a user of their own, who may not enter what is root's alone."""
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


def _private_folder() -> str:
    """For calls that cannot mount one; what executors that were killed have left is removed first."""
    import tempfile

    prefix = "asterism-sandbox-"
    for name in os.listdir(tempfile.gettempdir()):
        if name.startswith(prefix) and not os.path.exists(f"/proc/{name.split('-')[2]}"):
            remove_folder(f"{tempfile.gettempdir()}/{name}")
    folder = tempfile.mkdtemp(prefix=f"{prefix}{os.getppid()}-")
    os.chmod(folder, 0o711)
    return folder


def _own_tasks() -> int:
    """Processes and threads of this user, which the kernel counts together where there is no user namespace."""
    count = 0
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == os.getuid():
                count += len(os.listdir(f"/proc/{name}/task"))
        except OSError:
            continue  # it has ended
    return count


def _mapped_bytes(how: Isolating) -> int:
    fd = os.open("self/statm", os.O_RDONLY, dir_fd=how.proc)
    try:
        return int(os.read(fd, 256).split()[0]) * os.sysconf("SC_PAGE_SIZE")
    finally:
        os.close(fd)


def _filter(missing: list[str]) -> seccomp.Filter | None:
    """Puts the fork server's own filter on this process, for all that it forks. None where the kernel has none."""
    try:
        seccomp.server_filter().install()
    except (OSError, KeyError) as error:
        missing.append(f"No seccomp filter ({error}): use a kernel with CONFIG_SECCOMP_FILTER on x86-64 or arm64.")
        return None
    return seccomp.call_filter()


def _allow_many_files() -> None:
    """Four for each call and session."""
    _, open_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_files, open_files))


def _load(settings: Settings, how: Isolating) -> None:
    """What calls find in their process; run in the one that is copied for them."""
    rehearse(settings.flavour)
    sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")  # pyright: ignore
    for name in [name for name in sys.modules if name.partition(".")[0] == "sandbox"]:
        del sys.modules[name]  # here and not in the copy: to walk through the modules there copies their pages
    gc.collect()
    gc.freeze()
    huge_pages.gather(how.proc)
    cell_process.limit_for_all_calls(settings, _mapped_bytes(how))

"""Process 1 of a container: starts fork servers and graders for the executor, and buries them. Standard library only.

It connects to the executor's socket, which lies in a folder that the container sees; nothing listens in the container.

    keeper -> executor   {"secret", "pid"} once; {"ended": token, "code"} for each process; {"used", "limit"} in bytes
    executor -> keeper   {"op": "start", "token", "module", "settings"}      {"op": "kill", "token"}      {"op": "memory"}

A process that it starts connects by itself, says {"secret", "token"}, and speaks with the executor alone from then on.
When the executor lets go of the keeper's connection, the keeper ends, and with it the container.
"""

import contextlib
import os
import select
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from sandbox.inside.command import ENVIRONMENT, python_command
from sandbox.inside.frames import Frame, FrameReader, encode
from sandbox.inside.import_folders import standard_folders
from sandbox.inside.settings import from_json

SOCKET = "/run/asterism/executor.sock"
SECRET = "ASTERISM_SECRET"  # the variable that holds what proves who connects
_ROOT = "/opt/asterism"
_PACKAGES = f"{_ROOT}/packages"
_PYTHON = os.path.realpath(sys.executable)
# (in use, its limit, what of it the kernel gives back when asked) of cgroup versions 2 and 1
_CGROUPS = (
    ("/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.stat"),
    (
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.stat",
    ),
)


class Keeper:
    """Waits in `epoll` for the executor and for the ends of what it started."""

    def __init__(self, executor: socket.socket, secret: str) -> None:
        self._executor = executor
        self._secret = secret
        self._reader = FrameReader()
        self._poll = select.epoll()
        self._poll.register(executor, select.EPOLLIN)
        self._tokens: dict[int, str] = {}  # by pidfd
        self._pids: dict[str, int] = {}

    def serve(self) -> None:
        """Until the executor closes its end."""
        self._send({"secret": self._secret, "pid": os.getpid()})
        while True:
            for fd, _ in self._poll.poll():
                if fd != self._executor.fileno():
                    self._bury(fd)
                elif not self._read():
                    return

    def _read(self) -> bool:
        chunk = self._executor.recv(1 << 16)
        for frame in self._reader.feed(chunk):
            match frame["op"]:
                case "start":
                    self._start(frame)
                case "kill":
                    self._kill(frame["token"])
                case "memory":
                    self._bury_orphans()
                    self._send(_memory())
                case _:
                    raise ValueError(f"unknown op {frame['op']}")
        return bool(chunk)

    def _start(self, frame: Frame) -> None:
        packages = tuple(path for path in (_PACKAGES,) if Path(path).exists())
        settings = from_json(frame["settings"])._replace(import_folders=(*standard_folders(), *packages))
        try:
            pid = os.fork()
        except OSError as error:  # the calls hold all processes that the container may have; it must not end for that
            self._send({"ended": frame["token"], "code": error.errno})
            return
        if pid == 0:
            try:
                _become_server(
                    frame["token"],
                    self._secret,
                    lambda fd: python_command(_PYTHON, _ROOT, frame["module"], settings, fd),
                )
            finally:
                os._exit(1)
        pidfd = os.pidfd_open(pid)
        self._tokens[pidfd] = frame["token"]
        self._pids[frame["token"]] = pid
        self._poll.register(pidfd, select.EPOLLIN)

    def _kill(self, token: str) -> None:
        """SIGTERM, which a fork server's parent passes on as a kill of all that its namespace holds."""
        if token in self._pids:
            os.kill(self._pids[token], signal.SIGTERM)

    def _bury(self, pidfd: int) -> None:
        token = self._tokens.pop(pidfd)
        _, status = os.waitpid(self._pids.pop(token), 0)
        self._poll.unregister(pidfd)
        os.close(pidfd)
        self._send({"ended": token, "code": os.waitstatus_to_exitcode(status)})

    def _bury_orphans(self) -> None:
        """What a fork server that was killed has left to this process."""
        with contextlib.suppress(ChildProcessError):
            while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                if ended.si_pid in self._pids.values():
                    return  # one of its own: `_bury` comes to it, and the next time to the orphans
                os.waitpid(ended.si_pid, 0)

    def _send(self, frame: Frame) -> None:
        self._executor.sendall(encode(frame))


def _become_server(token: str, secret: str, command: Callable[[int], list[str]]) -> NoReturn:
    connection = _connect()
    connection.sendall(encode({"secret": secret, "token": token}))
    connection.set_inheritable(True)
    quiet = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1):
        os.dup2(quiet, fd)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.execve(_PYTHON, command(connection.fileno()), ENVIRONMENT)


def _connect() -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(SOCKET)
    return connection


def _memory() -> Frame:
    """What the container's processes hold, page cache that can be dropped left out."""
    for used, limit, stat in _CGROUPS:
        if Path(used).exists():
            lines = dict(line.split() for line in Path(stat).read_text().splitlines())
            cache = int(lines.get("total_inactive_file", lines.get("inactive_file", "0")))
            bound = Path(limit).read_text().strip()
            return {"used": int(Path(used).read_text()) - cache, "limit": int(bound) if bound.isdigit() else 0}
    return {"used": 0, "limit": 0}


def _leave(*_: object) -> NoReturn:
    os._exit(0)


def main() -> NoReturn:
    """Ends the container when the executor has gone."""
    signal.signal(signal.SIGTERM, _leave)  # process 1 has no default action
    secret = os.environ.pop(SECRET)
    with contextlib.suppress(ConnectionError):
        Keeper(_connect(), secret).serve()
    os._exit(0)


if __name__ == "__main__":
    main()

"""Process 1 of a container: starts and reaps fork servers and graders for the executor.

It connects to the executor's socket in a mounted folder; no process in the container listens.

    init -> executor   {"secret", "pid"} once; {"ended": token, "code"} per process; {"used", "limit"} in bytes
    executor -> init   {"op": "start", "token", "module", "settings"}   {"op": "kill", "token"}   {"op": "memory"}

A started process opens its own connection to the executor and sends {"secret", "token"} first.
When the executor closes the connection of process 1, process 1 exits and the container ends.
"""

import contextlib
import os
import select
import signal
import socket
import sys
from pathlib import Path
from typing import NoReturn

from asterism.sandbox.inside.wire.command import ENVIRONMENT, build_python_command, list_standard_folders
from asterism.sandbox.inside.wire.frames import Frame, FrameReader, encode_frame
from asterism.sandbox.inside.wire.server_settings import ServerSettings, parse_settings

EXECUTOR_SOCKET = "/run/asterism/executor.sock"
SECRET_VARIABLE = "ASTERISM_SECRET"  # authenticates a connection
_ROOT = "/opt/asterism"
_PACKAGES = f"{_ROOT}/packages"
_PYTHON = os.path.realpath(sys.executable)
# files of cgroup versions 2 and 1: memory in use, limit, statistics with the reclaimable page cache
_CGROUP = Path("/sys/fs/cgroup")
_CGROUP_FILES = (
    ("memory.current", "memory.max", "memory.stat"),
    ("memory/memory.usage_in_bytes", "memory/memory.limit_in_bytes", "memory/memory.stat"),
)


class ContainerInit:
    """Waits in `epoll` for the executor and for the exits of started processes."""

    def __init__(self, executor: socket.socket, secret: str) -> None:
        self._executor = executor
        self._secret = secret
        self._reader = FrameReader()
        self._poll = select.epoll()
        self._poll.register(executor, select.EPOLLIN)
        self._tokens_by_pidfd: dict[int, str] = {}
        self._pids_by_token: dict[str, int] = {}

    def serve(self) -> None:
        """Serve the executor until it closes its end."""
        self._send({"secret": self._secret, "pid": os.getpid()})
        while True:
            for fd, _ in self._poll.poll():
                if fd != self._executor.fileno():
                    self._reap(fd)
                elif not self._read_frames():
                    return

    def _read_frames(self) -> bool:
        chunk = self._executor.recv(1 << 16)
        for frame in self._reader.feed(chunk):
            match frame["op"]:
                case "start":
                    self._start_process(frame)
                case "kill":
                    self._kill_process(frame["token"])
                case "memory":
                    self._reap_orphans()
                    self._send(_read_memory_use())
                case _:
                    raise ValueError(f"unknown op {frame['op']}")
        return bool(chunk)

    def _start_process(self, frame: Frame) -> None:
        packages = tuple(path for path in (_PACKAGES,) if Path(path).exists())
        settings = parse_settings(frame["settings"])._replace(import_folders=(*list_standard_folders(), *packages))
        try:
            pid = os.fork()
        except OSError as error:  # for example, calls hold all processes that the container may have
            self._send({"ended": frame["token"], "code": error.errno})
            return
        if pid == 0:
            try:
                _exec_server(frame["token"], self._secret, frame["module"], settings)
            finally:
                os._exit(1)
        pidfd = os.pidfd_open(pid)
        self._tokens_by_pidfd[pidfd] = frame["token"]
        self._pids_by_token[frame["token"]] = pid
        self._poll.register(pidfd, select.EPOLLIN)

    def _kill_process(self, token: str) -> None:
        """Send SIGTERM. A fork server's parent then kills the server's pid namespace."""
        if token in self._pids_by_token:
            os.kill(self._pids_by_token[token], signal.SIGTERM)

    def _reap(self, pidfd: int) -> None:
        token = self._tokens_by_pidfd.pop(pidfd)
        _, status = os.waitpid(self._pids_by_token.pop(token), 0)
        self._poll.unregister(pidfd)
        os.close(pidfd)
        self._send({"ended": token, "code": os.waitstatus_to_exitcode(status)})

    def _reap_orphans(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                if ended.si_pid in self._pids_by_token.values():
                    return  # `_reap` handles this process; the next call handles the orphans
                os.waitpid(ended.si_pid, 0)

    def _send(self, frame: Frame) -> None:
        self._executor.sendall(encode_frame(frame))


def _exec_server(token: str, secret: str, module: str, settings: ServerSettings) -> NoReturn:
    connection = _connect()
    connection.sendall(encode_frame({"secret": secret, "token": token}))
    connection.set_inheritable(True)
    quiet = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1):
        os.dup2(quiet, fd)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.setsid()
    os.execve(_PYTHON, build_python_command(_PYTHON, _ROOT, module, settings, connection.fileno()), ENVIRONMENT)


def _connect() -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(EXECUTOR_SOCKET)
    return connection


def _read_memory_use() -> Frame:
    """Return the memory of the container in bytes, without the reclaimable page cache."""
    for used, limit, stat in _CGROUP_FILES:
        if (_CGROUP / used).exists():
            lines = dict(line.split() for line in (_CGROUP / stat).read_text().splitlines())
            cache = int(lines.get("total_inactive_file", lines.get("inactive_file", "0")))
            bound = (_CGROUP / limit).read_text().strip()
            return {"used": int((_CGROUP / used).read_text()) - cache, "limit": int(bound) if bound.isdigit() else 0}
    return {"used": 0, "limit": 0}


def _exit_on_signal(*_: object) -> NoReturn:
    os._exit(0)


def main() -> NoReturn:
    """Serve until the executor closes the connection; the exit of process 1 then ends the container."""
    signal.signal(signal.SIGTERM, _exit_on_signal)  # process 1 has no default action for signals
    secret = os.environ.pop(SECRET_VARIABLE)
    with contextlib.suppress(ConnectionError):
        ContainerInit(_connect(), secret).serve()
    os._exit(0)


if __name__ == "__main__":
    main()

"""The zygote: a process that forks once per call, with all modules loaded and no data of any call.

    zygote -> fork server   a newline when it is ready, or the cause of its failure, once
    fork server -> zygote   uid and folder of the call, and whether it is a notebook, with its descriptors:
                             control, stdout, stderr, and the list of members of its cgroup, if it has one
    zygote -> fork server   the new process's pid, or the negative errno

The fork server does not fork itself, because it holds the texts of other calls, and each page
written between two forks is copied again. The new process is the fork server's child. The kernel
kills the zygote when the fork server ends.
"""

import errno
import os
import signal
import socket
import struct
from collections.abc import Callable, Sequence
from typing import NoReturn

from asterism.sandbox.inside.call import call_process
from asterism.sandbox.inside.call.call_process import CallIsolation
from asterism.sandbox.inside.isolation import syscalls

# uid of the call, or -1; number of descriptors; whether the call is a notebook. The path of its folder may follow.
_REQUEST = struct.Struct("<qB?")
_ANSWER = struct.Struct("<i")
_MAX_REQUEST_BYTES = 256
_MAX_ERROR_BYTES = 4096
_READY = "\n"
_MAX_FDS = 4
_FD_BYTES = struct.calcsize("i")


class Zygote:
    """A handle of the zygote, which runs `load` to load modules for calls, and closes `private_fds`.

    Raises ImportError if `load` fails.
    """

    def __init__(self, isolation: CallIsolation, private_fds: Sequence[int], load: Callable[[], None]) -> None:
        self._socket, theirs = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                syscalls.die_with_parent(signal.SIGKILL)
                self._socket.close()
                for fd in private_fds:
                    os.close(fd)
                _load_or_exit(theirs, load)
                _serve(theirs, isolation)
            except BaseException:  # must not return into the fork server's start
                os._exit(1)
        theirs.close()
        problem = self._socket.recv(_MAX_ERROR_BYTES).decode()
        if problem != _READY:
            raise ImportError(problem or "the zygote has ended")

    def fork(self, fds: Sequence[int], uid: int | None, folder: str | None, *, is_notebook: bool) -> int:
        """Fork a process that isolates itself and waits for a call; return its pid. Raises OSError."""
        request = _REQUEST.pack(-1 if uid is None else uid, len(fds), is_notebook) + os.fsencode(folder or "")
        socket.send_fds(self._socket, [request], fds)
        answer = self._socket.recv(_ANSWER.size)
        if not answer:
            raise ConnectionError("the zygote has ended")
        (pid,) = _ANSWER.unpack(answer)
        if pid < 0:
            raise OSError(-pid, os.strerror(-pid))
        return pid


def _load_or_exit(fork_server: socket.socket, load: Callable[[], None]) -> None:
    try:
        load()
    except (OSError, ImportError) as error:
        fork_server.send(f"{type(error).__name__}: {error}".encode()[:_MAX_ERROR_BYTES])
        os._exit(1)
    fork_server.send(_READY.encode())


def _serve(fork_server: socket.socket, isolation: CallIsolation) -> NoReturn:
    ancillary_bytes = socket.CMSG_SPACE(_MAX_FDS * _FD_BYTES)
    while True:
        request, ancillary, _, _ = fork_server.recvmsg(_MAX_REQUEST_BYTES, ancillary_bytes)
        if not request:
            os._exit(0)
        received = ancillary[0][2] if ancillary else b""
        fds = struct.unpack(f"{len(received) // _FD_BYTES}i", received)
        try:
            if len(fds) < _REQUEST.unpack_from(request)[1]:  # the kernel closed the other descriptors
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            pid = _fork_call(request, fds, isolation)
        except OSError as error:
            pid = -(error.errno or errno.EAGAIN)
        for fd in fds:
            os.close(fd)
        fork_server.send(_ANSWER.pack(pid))


def _fork_call(request: bytes, fds: tuple[int, ...], isolation: CallIsolation) -> int:
    """Fork; return the new process's pid. The new process itself never returns. Raises OSError."""
    uid, _, is_notebook = _REQUEST.unpack_from(request)
    folder = os.fsdecode(request[_REQUEST.size :]) or None
    own_ruleset = None
    if folder is not None and isolation.landlock is not None:  # copies no pages here
        own_ruleset = isolation.landlock.create_ruleset(folder)
        isolation = isolation._replace(ruleset=own_ruleset)
    if uid >= 0:
        isolation = isolation._replace(user=uid)
    try:
        pid = syscalls.clone_for_parent(syscalls.CLONE_NEWPID if isolation.own_namespaces else 0)
        if pid == 0:
            call_process.run_call_process(fds, folder, isolation, is_notebook=is_notebook)
        return pid
    finally:
        if own_ruleset is not None:
            os.close(own_ruleset)

"""The process that is copied for each call: it holds all that calls may need, and nothing of theirs. Standard library only.

    template -> fork server   nothing but a line's end when it is ready, or why it is not, once
    fork server -> template   user and folder of the call, with its three descriptors: control, stdout, stderr
    template -> fork server   the new process's id, or minus the number of the error

Not the fork server itself: that holds the texts of other calls, and whatever a process writes between two copies is
copied again, page by page. The new process is the fork server's child. The template ends with the fork server.
"""

import os
import signal
import socket
import struct
from collections.abc import Callable, Sequence
from typing import NoReturn

from sandbox.inside import cell_process, kernel
from sandbox.inside.cell_process import Isolating

_PLACE = struct.Struct("<q")  # the user that the call becomes, -1 for none; its folder follows, where it has one
_ANSWER = struct.Struct("<i")
_PLACE_BYTES = 256
_PROBLEM_BYTES = 4096
_READY = "\n"
_NUM_FDS = 3
_FDS = struct.Struct(f"{_NUM_FDS}i")


class Template:
    """`load` is run in it, and loads what calls may need; `private` are descriptors that no call may have.

    Raises ImportError if it cannot.
    """

    def __init__(self, how: Isolating, private: Sequence[int], load: Callable[[], None]) -> None:
        self._socket, theirs = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                kernel.die_with_parent(signal.SIGKILL)
                self._socket.close()
                for fd in private:
                    os.close(fd)
                _load(theirs, load)
                _serve(theirs, how)
            except BaseException:  # nothing may return into the fork server's own start
                os._exit(1)
        theirs.close()
        problem = self._socket.recv(_PROBLEM_BYTES).decode()
        if problem != _READY:
            raise ImportError(problem or "the template has ended")

    def copy(self, fds: tuple[int, int, int], user: int | None, folder: str | None) -> int:
        """A new process that isolates itself and waits for a call. Its id; raises OSError."""
        place = _PLACE.pack(-1 if user is None else user) + os.fsencode(folder or "")
        socket.send_fds(self._socket, [place], fds)
        answer = self._socket.recv(_ANSWER.size)
        if not answer:
            raise ConnectionError("the template has ended")
        (pid,) = _ANSWER.unpack(answer)
        if pid < 0:
            raise OSError(-pid, os.strerror(-pid))
        return pid


def _load(fork_server: socket.socket, load: Callable[[], None]) -> None:
    try:
        load()
    except (OSError, ImportError) as error:
        fork_server.send(f"{type(error).__name__}: {error}".encode()[:_PROBLEM_BYTES])
        os._exit(1)
    fork_server.send(_READY.encode())


def _serve(fork_server: socket.socket, how: Isolating) -> NoReturn:
    flags = kernel.CLONE_NEWPID if how.own_namespaces else 0
    room = socket.CMSG_SPACE(_FDS.size)
    while True:
        place, ancillary, _, _ = fork_server.recvmsg(_PLACE_BYTES, room)
        if not place:
            os._exit(0)
        control, stdout, stderr = fds = _FDS.unpack(ancillary[0][2])
        (user,) = _PLACE.unpack_from(place)
        folder = os.fsdecode(place[_PLACE.size :]) or None
        mine = how
        if folder is not None and how.landlock is not None:  # here, where the steps' pages are not copied
            mine = mine._replace(ruleset=how.landlock.ruleset(folder))
        if user >= 0:
            mine = mine._replace(unprivileged_id=user)
        try:
            pid = kernel.copy_for_parent(flags)
        except OSError as error:
            pid = -(error.errno or 1)
        if pid == 0:
            cell_process.run(control, stdout, stderr, folder, mine)
        for fd in fds:
            os.close(fd)
        if mine.ruleset is not None and mine.ruleset != how.ruleset:
            os.close(mine.ruleset)
        fork_server.send(_ANSWER.pack(pid))

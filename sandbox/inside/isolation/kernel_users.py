"""The kernel users of a fork server and of its calls.

The kernel counts epoll watches, pages of pipes, descriptors in flight, pending signals, processes,
locked memory and keys by user, over all namespaces. A call with a user of its own takes none of
these from other calls. Users come from `FIRST_USER` to 4,138,399,999: beyond the ranges of accounts,
containers and systemd, and below the two ids that mean "no user".

A server gets the block of its process id, and its first user is the server itself. The calls take
the others in turns: a user that becomes free goes to the end of the queue. It becomes free when
process 1 of its call has been reaped, because the kernel then has ended all others. Only root may map
users into a namespace, so the executor does that (asterism.sandbox.hosts.user_maps):

    executor -> server   the first user, before the server isolates itself
    server -> executor   MAP_REQUEST, in its new user namespace
    executor -> server   MAPPED, or NOT_MAPPED: then its calls share one user
"""

import os
import socket
import struct
from typing import NamedTuple

FIRST_USER, USERS_PER_SERVER, _NUM_BLOCKS = 2_500_000_000, 2_048, 800_000
_USER = struct.Struct("<Q")
MAP_REQUEST = b"\xff\xff\xff\xff"  # the length of no frame
MAPPED, NOT_MAPPED = b"1", b"0"


def get_first_user(server_pid: int) -> int:
    return FIRST_USER + server_pid % _NUM_BLOCKS * USERS_PER_SERVER


def list_call_users() -> range:
    """The users of the calls of this process, which is the first user itself, or root without namespaces."""
    first = os.getuid() or get_first_user(os.getpid())
    return range(first + 1, first + USERS_PER_SERVER)


def encode_first_user(user: int) -> bytes:
    return _USER.pack(user)


class OfferedUsers(NamedTuple):
    """Users that the executor offers to map."""

    first: int
    executor: socket.socket

    def request_map(self) -> bool:
        """Whether the executor has mapped the users into this process's user namespace. Raises OSError."""
        self.executor.sendall(MAP_REQUEST)
        return self.executor.recv(1) == MAPPED

    def become_first(self) -> None:
        """Raises OSError."""
        os.setresuid(self.first, self.first, self.first)


def receive_offer(executor: socket.socket) -> OfferedUsers:
    """Raises OSError if the executor has closed the socket."""
    sent = executor.recv(_USER.size, socket.MSG_WAITALL)
    if len(sent) < _USER.size:
        raise ConnectionError("the executor closed the socket")
    return OfferedUsers(_USER.unpack(sent)[0], executor)

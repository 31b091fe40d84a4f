"""The kernel users of a fork server and of its calls.

The kernel counts epoll watches, pages of pipes, descriptors in flight, pending signals, processes,
locked memory and keys by user, over all namespaces. A call with its own user uses no quota of other calls. User ids
range from `FIRST_USER` to 4,138,399,999: beyond the ranges of accounts,
containers and systemd, and below the two ids that mean "no user".

A server gets the block of its process id, and runs as the first user of the block. The calls
take the other users in turns: a free user goes to the end of the queue. A user is free when process 1
of its call has been reaped, because the kernel then has ended all its processes. Only root may map
users into a namespace, so the executor maps the users (asterism.sandbox.hosts.user_maps):

    executor -> server   the first user, before the server isolates itself
    server -> executor   MAP_REQUEST, in its new user namespace
    executor -> server   MAPPED, or NOT_MAPPED: then all calls share one user
"""

import os
import socket
import struct
from typing import NamedTuple

FIRST_USER, USERS_PER_SERVER, _NUM_BLOCKS = 2_500_000_000, 2_048, 800_000
_USER = struct.Struct("<Q")
MAP_REQUEST = b"\xff\xff\xff\xff"  # differs from the length of every frame
MAPPED, NOT_MAPPED = b"1", b"0"


def get_first_user(server_pid: int) -> int:
    return FIRST_USER + server_pid % _NUM_BLOCKS * USERS_PER_SERVER


def list_call_users() -> range:
    """Return the users for this process's calls. This process runs as the first user, or without namespaces as root."""
    first = os.getuid() or get_first_user(os.getpid())
    return range(first + 1, first + USERS_PER_SERVER)


def encode_first_user(user: int) -> bytes:
    return _USER.pack(user)


class OfferedUsers(NamedTuple):
    """Users that the executor offers to map."""

    first: int
    executor: socket.socket

    def request_map(self) -> bool:
        """Return whether the executor has mapped the users into this process's user namespace. Raises OSError."""
        self.executor.sendall(MAP_REQUEST)
        return self.executor.recv(1) == MAPPED

    def become_first(self) -> None:
        """Change this process's user to the first one. Raises OSError."""
        os.setresuid(self.first, self.first, self.first)


def receive_offer(executor: socket.socket) -> OfferedUsers:
    """Receive the executor's offer. Raises OSError if the executor has closed the socket."""
    sent = executor.recv(_USER.size, socket.MSG_WAITALL)
    if len(sent) < _USER.size:
        raise ConnectionError("the executor closed the socket")
    return OfferedUsers(_USER.unpack(sent)[0], executor)

"""Gives a fork server and its calls kernel users of their own, if this process is root.

asterism.sandbox.inside.isolation.kernel_users describes the users and the protocol.
"""

import asyncio
import contextlib
import socket
from pathlib import Path

import structlog

from asterism.sandbox.inside.isolation.kernel_users import (
    MAP_REQUEST,
    MAPPED,
    NOT_MAPPED,
    USERS_PER_SERVER,
    encode_first_user,
    get_first_user,
)
from asterism.sandbox.inside.isolation.namespaces import write_once

_TIMEOUT_S = 60.0  # time for the server's interpreter to start and to enter its namespaces
_SETGID, _SETUID = 1 << 6, 1 << 7  # bits of the capabilities in /proc/self/status


def may_map_users(server_pid: int) -> bool:
    """Return whether this process is root, in a user namespace that contains the server's users."""
    if not server_pid:  # the server is in a pid namespace outside this one
        return False
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    needed = _SETGID | _SETUID
    first = get_first_user(server_pid)
    ranges = [[int(word) for word in line.split()] for line in Path("/proc/self/uid_map").read_text().splitlines()]
    is_mapped = any(start <= first and first + USERS_PER_SERVER <= start + count for start, _, count in ranges)
    return is_mapped and int(status["CapEff"], 16) & needed == needed


def offer_users(connection: socket.socket, server_pid: int) -> None:
    """Send the first message to a server with `kernel_users` in its settings."""
    with contextlib.suppress(OSError):  # the server has ended, which its connection reports
        connection.send(encode_first_user(get_first_user(server_pid)))


async def answer_map_request(connection: socket.socket, server_pid: int) -> None:
    """Answer the server's map request; send nothing if the server sends other data, ends, or is too slow."""
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(_TIMEOUT_S):
            await _wait_until_readable(connection)
        if connection.recv(len(MAP_REQUEST), socket.MSG_PEEK) == MAP_REQUEST:
            connection.recv(len(MAP_REQUEST))
            connection.send(MAPPED if _map_users(server_pid) else NOT_MAPPED)


async def _wait_until_readable(connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    readable: asyncio.Future[None] = loop.create_future()
    loop.add_reader(connection, lambda: readable.done() or readable.set_result(None))
    try:
        await readable
    finally:
        loop.remove_reader(connection)


def _map_users(pid: int) -> bool:
    """Map the server's own user and its block of users to the same numbers inside."""
    first = get_first_user(pid)
    try:
        owner = Path(f"/proc/{pid}").stat()
        lines = [f"{first} {first} {USERS_PER_SERVER}"]
        if not first <= owner.st_uid < first + USERS_PER_SERVER:
            lines.insert(0, f"{owner.st_uid} {owner.st_uid} 1")
        write_once(f"/proc/{pid}/gid_map", f"{owner.st_gid} {owner.st_gid} 1\n")
        write_once(f"/proc/{pid}/uid_map", "\n".join(lines) + "\n")
    except OSError as error:
        structlog.get_logger().warning("kernel_users.not_mapped", pid=pid, cause=error.strerror)
        return False
    return True

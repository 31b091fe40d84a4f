"""Beyond one machine: CURVE keys, and the door that opens to the cluster's key alone.

Every process of a cluster holds the same key pair. A connection over TCP is encrypted, and both of its ends prove that
they hold a key; who does not prove it gets no answer at all, is cut off, and counted.
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq
import zmq.utils.z85

from configs.errors import UnusableInput

KEY_FILE = "cluster.key"
_DOMAIN = b"asterism"
_ZAP_ENDPOINT = "inproc://zeromq.zap.01"  # where ZeroMQ asks who may come in (RFC 27)
_SILENCE = b"300"  # the answer upon which ZeroMQ cuts a peer off without a word; 400 would tell it why
_HEARTBEAT_MS, _HEARTBEAT_TIMEOUT_MS = 2_000, 10_000  # a connection that carries nothing for so long is made anew
_HANDSHAKE_MS = 5_000  # for who does not end one; then he is cut off
_CONNECT_MS = 5_000  # without an answer; then it is tried again
_FAILED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL

Socket = zmq.Socket[bytes]


class ClusterKey(msgspec.Struct, frozen=True):
    """Both halves in Z85, 40 characters."""

    public: bytes
    secret: bytes

    def __repr__(self) -> str:
        return f"ClusterKey(public={self.public!r})"


def make_key(folder: Path) -> Path:
    """A new key pair's file, for its owner's eyes alone. Raises UnusableInput if there is one already, or if `folder` is none."""
    path = folder / KEY_FILE
    _, secret = zmq.curve_keypair()
    try:
        if folder.exists() and not folder.is_dir():
            raise UnusableInput(f"{folder}: Not a directory")
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(secret + b"\n")
    except FileExistsError as error:
        raise UnusableInput(f"{path} is there already; a cluster whose processes hold it would fall apart") from error
    except OSError as error:
        raise UnusableInput(f"{path}: {error.strerror}") from error
    return path


def load_key(path: Path) -> ClusterKey:
    """Raises UnusableInput for a file that is no key, or that others than its owner may read."""
    try:
        mode = path.stat().st_mode
        secret = path.read_bytes().strip()
        public = zmq.curve_public(secret)
    except OSError as error:
        raise UnusableInput(f"{path}: {error.strerror}; asterism keys makes a cluster's key") from error
    except (ValueError, zmq.ZMQError) as error:
        raise UnusableInput(f"{path}: this is no key; asterism keys makes one") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise UnusableInput(f"{path}: others may read it; chmod 600 {path}")
    return ClusterKey(public, secret)


def guard(socket: Socket, key: ClusterKey) -> None:
    """Where it is bound from now on, it is open to those alone whom the context's Doorkeeper lets in."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, key.secret)
    socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
    _keep_alive(socket)


def unlock(socket: Socket, key: ClusterKey) -> None:
    """Where it connects to from now on, it proves that it holds the key, and speaks to none who does not."""
    socket.setsockopt(zmq.CURVE_SERVERKEY, key.public)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, key.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, key.secret)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_MS)
    _keep_alive(socket)


def _keep_alive(socket: Socket) -> None:
    socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.TCP_MAXRT, _HEARTBEAT_TIMEOUT_MS)  # no heartbeat gets past what is not acknowledged


class Doorkeeper:
    """Answers ZeroMQ's question who may come in, and counts who does not. To be there before anything is bound to TCP."""

    def __init__(self, context: zmq.Context[Socket], key: ClusterKey, refused: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._refused = refused
        self._key = zmq.utils.z85.decode(key.public)
        self._questions: Socket = context.socket(zmq.ROUTER)
        self._questions.setsockopt(zmq.LINGER, 0)
        self._questions.bind(_ZAP_ENDPOINT)
        self._watched: list[tuple[Socket, Socket]] = []  # and what tells of it
        self._loop.add_reader(self._questions.fileno(), self._answer)

    def watch(self, socket: Socket) -> None:
        """Count the handshakes that fail there, for whatever reason."""
        monitor: Socket = socket.get_monitor_socket(_FAILED)
        self._watched.append((socket, monitor))
        self._loop.add_reader(monitor.fileno(), self._count, monitor)
        self._count(monitor)  # the descriptor reports nothing to who has not looked yet

    def _answer(self) -> None:
        while not self._questions.closed:
            try:
                route, _, version, request, _, _, _, mechanism, *credentials = self._questions.recv_multipart(
                    zmq.NOBLOCK
                )
            except zmq.Again:
                return
            is_known = mechanism == b"CURVE" and credentials == [self._key]
            verdict = (b"200", b"OK") if is_known else (_SILENCE, b"")
            self._questions.send_multipart([route, b"", version, request, *verdict, b"", b""])

    def _count(self, monitor: Socket) -> None:
        while not monitor.closed:
            try:
                monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._refused()

    def close(self) -> None:
        """While the sockets that it watches are still open."""
        for socket, monitor in self._watched:
            self._loop.remove_reader(monitor.fileno())
            socket.disable_monitor()
            monitor.close()
        self._loop.remove_reader(self._questions.fileno())
        self._questions.close()

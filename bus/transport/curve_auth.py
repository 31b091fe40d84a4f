"""Encryption and authentication of TCP connections with ZeroMQ's CURVE and the cluster's key.

All processes of a cluster have the same key pair. TCP connections are encrypted and authenticated
at both ends. A peer without the key gets no answer, is disconnected, and is counted.
"""

import asyncio
import os
import stat
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq
import zmq.utils.z85

from asterism.configs.errors import UnusableInput

KEY_FILE = "cluster.key"
_ZAP_DOMAIN = b"asterism"
_ZAP_ENDPOINT = "inproc://zeromq.zap.01"  # ZeroMQ sends authentication requests here (RFC 27)
_REJECT_SILENTLY = b"300"  # ZeroMQ then disconnects the peer without an answer; 400 would send the reason
_HEARTBEAT_INTERVAL_MS, _HEARTBEAT_TIMEOUT_MS = 2_000, 10_000  # ZeroMQ reconnects after the timeout
_HANDSHAKE_TIMEOUT_MS = 5_000  # time after which an unfinished handshake is disconnected
_CONNECT_TIMEOUT_MS = 5_000  # time after which ZeroMQ retries
_HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)

Socket = zmq.Socket[bytes]


class ClusterKey(msgspec.Struct, frozen=True):
    """A key pair; both keys in Z85, 40 characters."""

    public: bytes
    secret: bytes

    def __repr__(self) -> str:
        return f"ClusterKey(public={self.public!r})"


def generate_key(folder: Path) -> Path:
    """Write a new key to a file that only its owner can read. Raises UnusableInput if it exists or cannot be written."""
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
        raise UnusableInput(
            f"{path} exists already; replacing it would disconnect the processes that use it"
        ) from error
    except OSError as error:
        raise UnusableInput(f"{path}: {error.strerror}") from error
    return path


def load_key(path: Path) -> ClusterKey:
    """Load the key. Raises UnusableInput for a file that is not a key, or that other users can read."""
    try:
        mode = path.stat().st_mode
        secret = path.read_bytes().strip()
        public = zmq.curve_public(secret)
    except OSError as error:
        raise UnusableInput(f"{path}: {error.strerror}; generate a key with `asterism keys`") from error
    except (ValueError, zmq.ZMQError) as error:
        raise UnusableInput(f"{path}: not a key; generate one with `asterism keys`") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise UnusableInput(f"{path}: other users may read it; run chmod 600 {path}")
    return ClusterKey(public, secret)


def secure_server_socket(socket: Socket, key: ClusterKey) -> None:
    """Let this socket accept only clients that ZapAuthenticator accepts."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, key.secret)
    socket.setsockopt(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_TIMEOUT_MS)
    _enable_heartbeats(socket)


def secure_client_socket(socket: Socket, key: ClusterKey) -> None:
    """Let this socket authenticate with the key and reject servers without it."""
    socket.setsockopt(zmq.CURVE_SERVERKEY, key.public)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, key.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, key.secret)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_TIMEOUT_MS)
    _enable_heartbeats(socket)


def _enable_heartbeats(socket: Socket) -> None:
    socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_INTERVAL_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.TCP_MAXRT, _HEARTBEAT_TIMEOUT_MS)  # heartbeats cannot overtake unacknowledged TCP data


class ZapAuthenticator:
    """An authenticator that answers requests and counts failures. Make it before a socket binds to TCP."""

    def __init__(self, context: zmq.Context[Socket], key: ClusterKey, on_refused: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_refused = on_refused
        self._key = zmq.utils.z85.decode(key.public)
        self._zap_socket: Socket = context.socket(zmq.ROUTER)
        self._zap_socket.setsockopt(zmq.LINGER, 0)
        self._zap_socket.bind(_ZAP_ENDPOINT)
        self._monitors: list[tuple[Socket, Socket]] = []  # each socket and its monitor
        self._loop.add_reader(self._zap_socket.fileno(), self._answer_requests)

    def monitor_handshakes(self, socket: Socket) -> None:
        monitor: Socket = socket.get_monitor_socket(_HANDSHAKE_FAILED)
        self._monitors.append((socket, monitor))
        self._loop.add_reader(monitor.fileno(), self._count_failures, monitor)
        self._count_failures(monitor)  # the descriptor reports events only after a first read

    def _answer_requests(self) -> None:
        while not self._zap_socket.closed:
            try:
                route, _, version, request, _, _, _, mechanism, *credentials = self._zap_socket.recv_multipart(
                    zmq.NOBLOCK
                )
            except zmq.Again:
                return
            is_known = mechanism == b"CURVE" and credentials == [self._key]
            verdict = (b"200", b"OK") if is_known else (_REJECT_SILENTLY, b"")
            self._zap_socket.send_multipart([route, b"", version, request, *verdict, b"", b""])

    def _count_failures(self, monitor: Socket) -> None:
        while not monitor.closed:
            try:
                monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._on_refused()

    def close(self) -> None:
        """Close the monitors and the socket, while the monitored sockets are still open."""
        for socket, monitor in self._monitors:
            self._loop.remove_reader(monitor.fileno())
            socket.disable_monitor()
            monitor.close()
        self._loop.remove_reader(self._zap_socket.fileno())
        self._zap_socket.close()

"""One connection to the weights' server, for a thread that may wait, but not without end and not after it is told to stop."""

from __future__ import annotations

import threading
import time
from types import TracebackType

import zmq

from bus.curve import ClusterKey, unlock

_STOP_S = 0.1  # between two looks whether to stop
_RECONNECT_MS, _RECONNECT_MAX_MS = 50, 2_000
_BRISK = 1 / 8  # of the time after which it is given up
_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED

Socket = zmq.Socket[bytes]


class Broken(Exception):
    """It brings nothing any more; another one may. `str(error)` says why."""

    def __init__(self, cause: str, was_connected: bool) -> None:
        super().__init__(cause)
        self.was_connected = was_connected  # and each end had proved that it holds the key


class WeightConnection:
    def __init__(self, endpoint: str, key: ClusterKey, silent_s: float, stop: threading.Event) -> None:
        """While the server cannot be reached it is tried again and again, for `silent_s`."""
        self.is_brisk = False  # whether the last answer came soon after the one before
        self._silent_s = silent_s
        self._stop = stop
        self._connected = False
        self._context = zmq.Context[Socket]()
        self._socket: Socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
        unlock(self._socket, key)
        self._monitor: Socket = self._socket.get_monitor_socket(_EVENTS)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._socket.connect(endpoint)

    def __enter__(self) -> WeightConnection:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()
        self._context.term()

    def send(self, question: bytes) -> None:
        self._socket.send(question)

    def receive(self) -> tuple[bytes, zmq.Frame | None]:
        """The next answer: its question, and the bytes if the server has them. Raises Broken."""
        began = time.monotonic()
        while not self._stop.is_set():
            if time.monotonic() - began > self._silent_s:
                raise Broken(f"no answer for {self._silent_s} s", self._connected)
            ready = dict(self._poller.poll(int(1000 * _STOP_S)))
            if self._socket in ready:
                self.is_brisk = time.monotonic() - began < _BRISK * self._silent_s
                question, *chunk = self._socket.recv_multipart(copy=False)
                return question.bytes, chunk[0] if chunk else None
            if self._monitor in ready:
                self._note_event()
        raise Broken("told to stop", self._connected)

    def _note_event(self) -> None:
        event = int.from_bytes(self._monitor.recv_multipart()[0][:2], "little")
        if event == zmq.EVENT_DISCONNECTED:
            raise Broken("disconnected", self._connected)
        self._connected = True

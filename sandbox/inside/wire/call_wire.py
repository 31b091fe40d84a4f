"""The binary protocol between a fork server and a call's process.

    fork server -> process   a call: a program, or a cell of a notebook
    process -> fork server   CallStarted when the code begins (a notebook sends it only after a change),
                             then one CallAnswer

JSON would cost page copies in each forked process. The model's code can write to the socket, too: an
answer is valid only with its call's nonce, and a process that sends an invalid answer is killed.
"""

import os
import struct
import time
from typing import NamedTuple

CONTROL_FD = 3  # the descriptor of the process's socket
CallOutcome = list[str]
# Cause of a failed call that had not used its time limit (asterism.sandbox.inside.server.starvation).
STARVED_CAUSE = "the machine is too busy: a call got too little CPU time"

_CALL = struct.Struct("<BIQQII")  # kind, cells, seed, nonce, bytes of code, bytes of stdin
PROGRAM, CELL, CELL_WITHOUT_CHECKPOINT = 0, 1, 2  # kinds of calls
_STARTED = struct.Struct("<cddII")
_ANSWER = struct.Struct("<cIQI")  # tag, bytes of the outcome's text, nonce, cells
_STARTED_TAG, _ANSWER_TAG = b"s", b"a"
_CHUNK = 4096  # bytes; most calls fit


class CallRequest(NamedTuple):
    kind: int
    cells: int  # cells that the notebook's state must contain before this cell
    seed: int
    nonce: int
    code: str
    stdin: bytes

    @property
    def is_cell(self) -> bool:
        return self.kind != PROGRAM


class CallStarted(NamedTuple):
    """The start of a call's code. Times are of the monotonic clock. Pids are of the process's own pid namespace."""

    at: float  # start of the code
    checkpoint_at: float  # creation of the checkpoint
    worker: int  # pid that runs the code
    checkpoint: int  # pid with the state before the cell; 0: the base


class CallAnswer(NamedTuple):
    """The end of a call. `cells` is the number of cells in the notebook's state, this cell included."""

    nonce: int
    cells: int
    outcome: CallOutcome


def encode_call(kind: int, cells: int, seed: int, nonce: int, code: str, stdin: str) -> bytes:
    code_utf8, stdin_utf8 = code.encode("utf-8", "replace"), stdin.encode("utf-8", "backslashreplace")
    return _CALL.pack(kind, cells, seed, nonce, len(code_utf8), len(stdin_utf8)) + code_utf8 + stdin_utf8


def read_call() -> CallRequest:
    """Wait for a call. Exit the process when the fork server closes the socket."""
    received = _read_until(b"", _CALL.size)
    kind, cells, seed, nonce, code_bytes, stdin_bytes = _CALL.unpack_from(received)
    texts = _read_until(received[_CALL.size :], code_bytes + stdin_bytes)
    return CallRequest(kind, cells, seed, nonce, texts[:code_bytes].decode("utf-8", "replace"), texts[code_bytes:])


def _read_until(received: bytes, length: int) -> bytes:
    """Read until `length` bytes in total have arrived. The next call follows only after this call's answer."""
    chunks = [received]
    left = length - len(received)
    while left > 0:
        chunk = os.read(CONTROL_FD, min(max(left, _CHUNK), 1 << 20))
        if not chunk:
            os._exit(0)
        chunks.append(chunk)
        left -= len(chunk)
    return b"".join(chunks)


def write_started(worker: int = 0, checkpoint: int = 0, checkpoint_at: float = 0.0) -> None:
    os.write(CONTROL_FD, _STARTED.pack(_STARTED_TAG, time.monotonic(), checkpoint_at, worker, checkpoint))


def write_answer(outcome: CallOutcome, nonce: int, cells: int = 0) -> None:
    text = "\0".join(outcome).encode("utf-8", "backslashreplace")
    answer = _ANSWER.pack(_ANSWER_TAG, len(text), nonce, cells) + text
    while answer:
        answer = answer[os.write(CONTROL_FD, answer) :]


def parse_reply(received: bytes) -> tuple[CallStarted | None, CallAnswer | None]:
    """Return the complete messages in the received bytes. Raises ValueError on invalid bytes."""
    if received[:1] == _STARTED_TAG:
        if len(received) < _STARTED.size:
            return None, None
        _, *started = _STARTED.unpack_from(received)
        return CallStarted(*started), _parse_answer(received[_STARTED.size :])
    return None, _parse_answer(received)


def _parse_answer(received: bytes) -> CallAnswer | None:
    if received and received[:1] != _ANSWER_TAG:
        raise ValueError("the process sent neither a start nor an answer")
    if len(received) < _ANSWER.size:
        return None
    _, length, nonce, cells = _ANSWER.unpack_from(received)
    if len(received) > _ANSWER.size + length:
        raise ValueError("the process sent more than one answer")
    if len(received) < _ANSWER.size + length:
        return None
    return CallAnswer(nonce, cells, received[_ANSWER.size :].decode("utf-8", "replace").split("\0"))

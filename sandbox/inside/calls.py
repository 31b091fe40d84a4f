"""What a fork server and a forked process say to each other, as bytes. Standard library only.

    fork server -> process   a call: a program or a session's cell
    process -> fork server   Started, when its code begins, unless it is a session's and the same as before; one Answer

No JSON, whose machinery would cost each forked process page copies. Code that runs in the process can write to its
socket too: an answer counts only with its call's nonce, and what is no answer ends the process.
"""

import os
import struct
import time
from typing import NamedTuple

CONTROL = 3  # the descriptor of the process's socket
Outcome = list[str]

_CALL = struct.Struct("<BIQQII")  # kind, cells before it, seed, nonce, bytes of the code, bytes of the input
_PROGRAM, _CELL = 0, 1
_STARTED = struct.Struct("<cddII")
_ANSWER = struct.Struct("<cIQI")  # bytes of the outcome's text, nonce, cells
_START, _END = b"s", b"a"
_CHUNK = 4096  # most calls fit


class Call(NamedTuple):
    is_cell: bool
    cells: int  # that the session's state must hold before this one
    seed: int
    nonce: int
    code: str
    stdin: bytes


class Started(NamedTuple):
    """When the code began, by the monotonic clock. The process ids are those that the process itself sees."""

    at: float
    checkpoint_at: float  # when the checkpoint was made to which a session goes back if the cell dies
    worker: int  # who runs the code
    checkpoint: int  # who keeps the state before; 0: nobody but the session's first process


class Answer(NamedTuple):
    """How the call ended. `cells`: how many the session's state holds now, this one included if it is kept."""

    nonce: int
    cells: int
    outcome: Outcome


def call_bytes(is_cell: bool, cells: int, seed: int, nonce: int, code: str, stdin: str) -> bytes:
    code_utf8, stdin_utf8 = code.encode("utf-8", "replace"), stdin.encode("utf-8", "backslashreplace")
    kind = _CELL if is_cell else _PROGRAM
    return _CALL.pack(kind, cells, seed, nonce, len(code_utf8), len(stdin_utf8)) + code_utf8 + stdin_utf8


def read_call() -> Call:
    """Waits for one. The process ends when the fork server lets go of it."""
    received = _read_until(b"", _CALL.size)
    kind, cells, seed, nonce, code_bytes, stdin_bytes = _CALL.unpack_from(received)
    texts = _read_until(received[_CALL.size :], code_bytes + stdin_bytes)
    return Call(kind == _CELL, cells, seed, nonce, texts[:code_bytes].decode("utf-8", "replace"), texts[code_bytes:])


def _read_until(received: bytes, length: int) -> bytes:
    """Reads on, and no further than the fork server has sent: no call comes before the answer to the one before."""
    chunks = [received]
    left = length - len(received)
    while left > 0:
        chunk = os.read(CONTROL, min(max(left, _CHUNK), 1 << 20))
        if not chunk:
            os._exit(0)
        chunks.append(chunk)
        left -= len(chunk)
    return b"".join(chunks)


def say_started(worker: int = 0, checkpoint: int = 0, checkpoint_at: float = 0.0) -> None:
    os.write(CONTROL, _STARTED.pack(_START, time.monotonic(), checkpoint_at, worker, checkpoint))


def say_answer(outcome: Outcome, nonce: int, cells: int = 0) -> None:
    text = "\0".join(outcome).encode("utf-8", "backslashreplace")
    answer = _ANSWER.pack(_END, len(text), nonce, cells) + text
    while answer:
        answer = answer[os.write(CONTROL, answer) :]


def parse(received: bytes) -> tuple[Started | None, Answer | None]:
    """What a process has said since its call, as far as it has come. Raises ValueError if it is not that."""
    if received[:1] == _START:
        if len(received) < _STARTED.size:
            return None, None
        _, *started = _STARTED.unpack_from(received)
        return Started(*started), _answer(received[_STARTED.size :])
    return None, _answer(received)


def _answer(received: bytes) -> Answer | None:
    if received and received[:1] != _END:
        raise ValueError("neither a start nor an answer")
    if len(received) < _ANSWER.size:
        return None
    _, length, nonce, cells = _ANSWER.unpack_from(received)
    if len(received) > _ANSWER.size + length:
        raise ValueError("more than one answer")
    if len(received) < _ANSWER.size + length:
        return None
    return Answer(nonce, cells, received[_ANSWER.size :].decode("utf-8", "replace").split("\0"))

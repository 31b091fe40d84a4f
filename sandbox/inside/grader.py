"""The grader: compares answers with math-verify in a process that never holds a model's code.

Started by `sandbox.grading` like a fork server, in the same namespaces and under the same limits, of which it uses the
memory's. It reads {"id", "answer", "truth"} and writes {"id", "correct"}, one after the other. It has no deadline of
its own: math-verify's, which rest on SIGALRM and turn a hang into "wrong", are switched off, and the executor ends this
process when a comparison takes too long. Out of memory ends it too: neither is a wrong answer.
"""

import contextlib
import importlib
import logging
import os
import resource
import signal
import socket
import sys
from typing import Any, NoReturn

from sandbox.inside import kernel, namespaces, seccomp
from sandbox.inside.frames import FrameReader, encode
from sandbox.inside.settings import Settings, from_json

MIB = 1 << 20
_OWN_MIB = 1024  # math-verify and sympy themselves, beyond the limit for what they compute


def main() -> NoReturn:
    """Arguments: the settings' JSON, the socket's descriptor. Ends the process when the executor has gone."""
    settings = from_json(sys.argv[1])
    executor = socket.socket(fileno=int(sys.argv[2]))
    try:
        _isolate(settings, executor)
        logging.disable(logging.WARNING)  # math-verify warns that its own deadlines are off
        correct("\\frac{1}{2}", "0.5")  # loads all that a comparison needs
    except (OSError, ImportError) as error:
        executor.sendall(encode({"refused": f"{type(error).__name__}: {error}"}))
        os._exit(1)
    executor.sendall(encode({"hello": settings.flavour}))
    try:
        _serve(executor)
    except (ConnectionError, MemoryError):
        os._exit(1)
    os._exit(0)


def _isolate(settings: Settings, executor: socket.socket) -> None:
    sys.path[:] = list(settings.import_folders)
    if settings.namespaces:
        namespaces.enter([*settings.import_folders, sys.base_prefix], [executor.fileno()])
    else:
        kernel.die_with_parent(signal.SIGKILL)
    kernel.no_new_privileges()
    with contextlib.suppress(OSError, KeyError):  # the fork servers say so
        seccomp.server_filter().install()
    memory = (settings.memory_mib + _OWN_MIB) * MIB
    limits = {resource.RLIMIT_AS: memory, resource.RLIMIT_FSIZE: 0, resource.RLIMIT_CORE: 0}
    for kind, value in limits.items():
        resource.setrlimit(kind, (value, value))


def _serve(executor: socket.socket) -> None:
    reader = FrameReader()
    while chunk := executor.recv(1 << 18):
        for frame in reader.feed(chunk):
            verdict = correct(frame["answer"], frame["truth"])
            executor.sendall(encode({"id": frame["id"], "correct": verdict}))


def correct(answer: str, truth: str) -> bool | None:
    """Whether the two mean the same; None if the truth cannot be read, which is nobody's wrong answer.

    An answer that math-verify cannot read or compare is not equal. Raises MemoryError.
    """
    mine, theirs = _parsed(answer), _parsed(truth)
    if not theirs:
        return None
    math_verify: Any = importlib.import_module("math_verify")
    for gold in theirs:
        for candidate in mine:
            try:
                if math_verify.verify(gold, candidate, timeout_seconds=None, raise_on_error=True):
                    return True
            except MemoryError:
                raise
            except Exception:
                continue
    return False


def _parsed(text: str) -> list[Any]:
    math_verify: Any = importlib.import_module("math_verify")
    try:
        return math_verify.parse(f"${text}$", parsing_timeout=None, raise_on_error=True)
    except MemoryError:
        raise
    except Exception:
        return []

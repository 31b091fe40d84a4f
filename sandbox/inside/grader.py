"""The grader: compares answers with math-verify in a process that never runs the model's code.

`sandbox.pool.grader_client` starts it like a fork server, in the same namespaces and with the same
memory limit. It reads {"id", "answer", "truth"} and writes {"id", "correct"}, one comparison at a
time. math-verify's own timeouts are off, because they use SIGALRM and turn a hang into "wrong".
Instead, the executor kills this process when a comparison takes too long. That and a lack of
memory are infrastructure failures, not wrong answers.
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

from sandbox.inside.isolation import namespaces, seccomp, syscalls
from sandbox.inside.wire.frames import FrameReader, encode_frame
from sandbox.inside.wire.server_settings import ServerSettings, parse_settings

MIB = 1 << 20
_MATH_VERIFY_MIB = 1024  # address space of math-verify and sympy without data


def main() -> NoReturn:
    """Arguments: settings as JSON, socket descriptor. Exits when the executor closes the socket."""
    settings = parse_settings(sys.argv[1])
    executor = socket.socket(fileno=int(sys.argv[2]))
    try:
        _isolate(settings, executor)
        logging.disable(logging.WARNING)  # math-verify warns that its timeouts are off
        compare_answers("\\frac{1}{2}", "0.5")  # loads lazy imports
    except (OSError, ImportError) as error:
        executor.sendall(encode_frame({"refused": f"{type(error).__name__}: {error}"}))
        os._exit(1)
    executor.sendall(encode_frame({"hello": settings.preload}))
    try:
        _serve(executor)
    except (ConnectionError, MemoryError):
        os._exit(1)
    os._exit(0)


def _isolate(settings: ServerSettings, executor: socket.socket) -> None:
    sys.path[:] = list(settings.import_folders)
    if settings.namespaces:
        namespaces.enter_namespaces([*settings.import_folders, sys.base_prefix], [executor.fileno()])
    else:
        syscalls.die_with_parent(signal.SIGKILL)
    syscalls.set_no_new_privileges()
    with contextlib.suppress(OSError, KeyError):  # the fork servers report a missing filter
        seccomp.build_server_filter().install()
    memory = (settings.memory_mib + _MATH_VERIFY_MIB) * MIB
    limits = {resource.RLIMIT_AS: memory, resource.RLIMIT_FSIZE: 0, resource.RLIMIT_CORE: 0}
    for kind, value in limits.items():
        resource.setrlimit(kind, (value, value))


def _serve(executor: socket.socket) -> None:
    reader = FrameReader()
    while chunk := executor.recv(1 << 18):
        for frame in reader.feed(chunk):
            verdict = compare_answers(frame["answer"], frame["truth"])
            executor.sendall(encode_frame({"id": frame["id"], "correct": verdict}))


def compare_answers(answer: str, truth: str) -> bool | None:
    """Whether the two are equal; None if math-verify cannot parse the truth.

    An answer that math-verify cannot parse or compare is not equal. Raises MemoryError.
    """
    mine, theirs = _parse(answer), _parse(truth)
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


def _parse(text: str) -> list[Any]:
    math_verify: Any = importlib.import_module("math_verify")
    try:
        return math_verify.parse(f"${text}$", parsing_timeout=None, raise_on_error=True)
    except MemoryError:
        raise
    except Exception:
        return []

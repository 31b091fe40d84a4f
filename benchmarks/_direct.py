"""The least that can drive a fork server: a blocking socket and ready-made frames. No asyncio, no queue, no results."""

from __future__ import annotations

import time

from configs.schema import Sandbox as SandboxConfig
from sandbox.host import Host, Launched
from sandbox.inside.frames import LENGTH, Frame, encode
from sandbox.inside.settings import Settings

_OK = b'"kind":"ok"'
_TIMEOUT_S = 60.0


class DirectClient:
    """Holds a fork server of its own, on the sandbox's host."""

    def __init__(self, launched: Launched) -> None:
        self._launched = launched
        self._socket = launched.socket
        self._calls = 0
        self._received = bytearray()

    @classmethod
    async def start(cls, host: Host, config: SandboxConfig, namespaces: bool) -> DirectClient:
        launched = await host.launch(
            "sandbox.inside.boot",
            Settings(
                flavour="bare",
                namespaces=namespaces,
                import_folders=(),
                time_limit_s=config.time_limit_s,
                memory_mib=config.memory_mib,
                max_processes=config.max_processes,
                file_mib=config.file_mib,
                output_bytes=config.output_kib * 1024,
            ),
        )
        client = cls(launched)
        client._socket.settimeout(_TIMEOUT_S)
        (hello,) = client._answers()
        assert b'"hello"' in hello, hello
        return client

    def seconds_per_call(self, code: str, in_flight: int, seconds: float) -> float:
        """Keeps so many calls in flight for so long, and then waits for the last."""
        started = time.perf_counter()
        self._send(code, in_flight)
        sent, answered = in_flight, 0
        while answered < sent:
            answers = self._answers()
            assert all(_OK in answer for answer in answers), answers
            answered += len(answers)
            if time.perf_counter() < started + seconds:
                self._send(code, len(answers))
                sent += len(answers)
        return (time.perf_counter() - started) / sent

    async def stop(self) -> None:
        self._socket.close()
        await self._launched.ended()

    def _send(self, code: str, count: int) -> None:
        self._socket.sendall(b"".join(encode(self._frame(code)) for _ in range(count)))

    def _frame(self, code: str) -> Frame:
        self._calls += 1
        fields = {"id": self._calls, "op": "run", "code": code, "stdin": "", "seed": self._calls}
        return {**fields, "session": None, "cells": 0}

    def _answers(self) -> list[bytes]:
        """Those that are complete after one read; none if what was read is part of one."""
        chunk = self._socket.recv(1 << 18)
        if not chunk:
            raise ConnectionError("the fork server has gone")
        self._received += chunk
        answers: list[bytes] = []
        start = 0
        while len(self._received) >= start + LENGTH.size:
            (length,) = LENGTH.unpack_from(self._received, start)
            end = start + LENGTH.size + length
            if len(self._received) < end:
                break
            answers.append(bytes(self._received[start + LENGTH.size : end]))
            start = end
        del self._received[:start]
        return answers

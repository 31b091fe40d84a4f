"""A minimal client of a fork server, with a blocking socket and prebuilt frames, without asyncio and queues."""

from __future__ import annotations

import time

from asterism.configs.schema.machines import SandboxConfig as SandboxConfig
from asterism.sandbox.hosts.host import Host, LaunchedProcess
from asterism.sandbox.inside.wire.frames import LENGTH, Frame, encode_frame
from asterism.sandbox.inside.wire.server_settings import ServerSettings

_OK = b'"kind":"ok"'
_TIMEOUT_S = 60.0


class DirectClient:
    """A client with its own fork server on the same host as the sandbox."""

    def __init__(self, launched: LaunchedProcess) -> None:
        self._launched = launched
        self._socket = launched.socket
        self._calls = 0
        self._received = bytearray()

    @classmethod
    async def start(cls, host: Host, config: SandboxConfig, namespaces: bool) -> DirectClient:
        launched = await host.launch(
            "asterism.sandbox.inside.server.boot",
            ServerSettings(
                preload="bare",
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
        (hello,) = client._read_answers()
        assert b'"hello"' in hello, hello
        return client

    def measure_seconds_per_call(self, code: str, in_flight: int, seconds: float) -> float:
        """Keep `in_flight` calls in flight for `seconds`, wait for the last answer, and return the seconds per call."""
        started = time.perf_counter()
        self._send(code, in_flight)
        sent, answered = in_flight, 0
        while answered < sent:
            answers = self._read_answers()
            assert all(_OK in answer for answer in answers), answers
            answered += len(answers)
            if time.perf_counter() < started + seconds:
                self._send(code, len(answers))
                sent += len(answers)
        return (time.perf_counter() - started) / sent

    async def stop(self) -> None:
        self._socket.close()
        await self._launched.wait()

    def _send(self, code: str, count: int) -> None:
        self._socket.sendall(b"".join(encode_frame(self._build_frame(code)) for _ in range(count)))

    def _build_frame(self, code: str) -> Frame:
        self._calls += 1
        fields = {"id": self._calls, "op": "run", "code": code, "stdin": "", "seed": self._calls}
        return {**fields, "session": None, "cells": 0}

    def _read_answers(self) -> list[bytes]:
        """Read once. Return the complete messages that arrived, which can be none."""
        chunk = self._socket.recv(1 << 18)
        if not chunk:
            raise ConnectionError("the fork server closed its socket")
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

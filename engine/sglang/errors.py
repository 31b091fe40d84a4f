"""Exceptions of the SGLang client.

EngineFailure            of engine.contract
  ServerUnreachable      connection refused or broken; `request_sent`: the server may have received the request
  ServerTimeout          no response within the timeout
  ServerStatusError      an HTTP status other than 200, with the server's message
  InvalidResponse        a response that no supported SGLang version sends
  UpdateRefused          the server refused a weight update or a process group, with its message
"""

from __future__ import annotations

from engine.contract import EngineFailure


class ServerUnreachable(EngineFailure):
    def __init__(self, message: str, *, request_sent: bool) -> None:
        super().__init__(message)
        self.request_sent = request_sent


class ServerTimeout(EngineFailure):
    def __init__(self, message: str, waited_s: float) -> None:
        super().__init__(message)
        self.waited_s = waited_s


class ServerStatusError(EngineFailure):
    def __init__(self, path: str, status: int, message: str) -> None:
        super().__init__(f"the server refused {path}: {status} {message}")
        self.status = status
        self.message = message


class InvalidResponse(EngineFailure):
    pass


class UpdateRefused(EngineFailure):
    pass

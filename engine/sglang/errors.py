"""What can go wrong between the engine and its server.

EngineFailure                      of engine.contract
  ServerUnreachable                nobody listens, or the connection broke; `sent`: the server may have the request
  ServerSlow                       nothing came for as long as is waited
  ServerRefused                    an HTTP status that is not 200, with what the server said
  UnknownAnswer                    an answer that is not of a version that is known here
  UpdateRefused                    weights, a group or memory: the server did not do it, and said why
"""

from __future__ import annotations

from engine.contract import EngineFailure


class ServerUnreachable(EngineFailure):
    def __init__(self, message: str, *, sent: bool) -> None:
        super().__init__(message)
        self.sent = sent


class ServerSlow(EngineFailure):
    def __init__(self, message: str, waited_s: float) -> None:
        super().__init__(message)
        self.waited_s = waited_s


class ServerRefused(EngineFailure):
    def __init__(self, path: str, status: int, message: str) -> None:
        super().__init__(f"the server refused {path}: {status} {message}")
        self.status = status
        self.message = message


class UnknownAnswer(EngineFailure):
    pass


class UpdateRefused(EngineFailure):
    pass

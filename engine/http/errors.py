"""Defines the errors of requests to an inference server, and parses the errors in its responses.

EngineFailure            base class, in asterism.engine.contract
  ServerUnreachable      connection refused or broken; `request_sent`: the server can have received the request
  ServerTimeout          no response within the timeout
  ServerStatusError      an HTTP status other than 200, with the server's message
  InvalidResponse        a response that no supported server sends
"""

from collections.abc import Collection

import msgspec

from asterism.engine.contract import EngineFailure


class ServerUnreachable(EngineFailure):
    def __init__(self, message: str, *, request_sent: bool) -> None:
        super().__init__(message)
        self.request_sent = request_sent


class ServerTimeout(EngineFailure):
    def __init__(self, message: str, waited_s: float) -> None:
        super().__init__(message)
        self.waited_s = waited_s


class ServerStatusError(EngineFailure):
    def __init__(self, path: str, status: int, message: str, retry_after_s: float = 0.0) -> None:
        """`retry_after_s`: the time that the server asks to wait."""
        super().__init__(f"the server refused {path}: {status} {message}")
        self.status, self.message, self.retry_after_s = status, message, retry_after_s


class InvalidResponse(EngineFailure):
    pass


def is_safe_to_repeat(failure: ServerUnreachable | ServerStatusError, statuses: Collection[int]) -> bool:
    """Return whether the server has not started the request: it did not receive it, or answered one of `statuses`."""
    return failure.status in statuses if isinstance(failure, ServerStatusError) else not failure.request_sent


class _ErrorDetail(msgspec.Struct):
    message: str = ""
    code: int | str | None = None  # a status, or a name in OpenAI's API


class _ErrorResponse(msgspec.Struct):
    """The three error formats of servers: {"error": {...}}, {"error": "..."} and {"message": ...}."""

    error: _ErrorDetail | str | None = None
    message: str = ""


def parse_error(content: bytes) -> tuple[int | None, str] | None:
    """Return the error's status, if included, and its message; None if the content is not an error."""
    try:
        response = msgspec.json.decode(content, type=_ErrorResponse)
    except ValueError:  # invalid JSON or UTF-8
        return None
    match response.error:
        case _ErrorDetail(message=message, code=code):
            return code if isinstance(code, int) else None, message
        case str(message):
            return None, message
        case None:
            return (None, response.message) if response.message else None

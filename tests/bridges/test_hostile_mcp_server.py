"""McpTools with a hostile HTTP server: endless, compressed and redirecting responses."""

import contextlib
import gzip
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.bridges.bridge_servers import run_client

pytestmark = pytest.mark.bridges
_CHUNK = b": ping\n\n" * (1 << 15)


class HostileServer(ThreadingHTTPServer):
    """A server whose answer depends on the first part of the path. It counts sent bytes, and requests to /internal."""

    daemon_threads = True
    sent_bytes = num_internal = 0


class _Handler(BaseHTTPRequestHandler):
    server: HostileServer  # pyright: ignore[reportIncompatibleVariableOverride]

    def log_request(self, code: object = "-", size: object = "-") -> None: ...

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        with contextlib.suppress(ConnectionError):
            match self.path:
                case "/redirect":
                    self._send(307, Location="/internal")
                case "/bomb":
                    self._send(200, gzip.compress(b" " * (64 << 20)), **{"Content-Encoding": "gzip"})
                case "/endless" | "/document":
                    kind = "text/event-stream" if self.path == "/endless" else "application/json"
                    self.send_response(200)
                    self.send_header("Content-Type", kind)
                    self.end_headers()
                    while True:
                        self.wfile.write(_CHUNK)
                        self.server.sent_bytes += len(_CHUNK)
                case _:
                    self.server.num_internal += 1
                    self._send(200, b"{}")

    def _send(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def server() -> Iterator[HostileServer]:
    with HostileServer(("127.0.0.1", 0), _Handler) as each:
        threading.Thread(target=each.serve_forever, daemon=True).start()
        yield each
        each.shutdown()


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("redirect", "the server redirects to /internal; set `url` to this address"),
        ("bomb", "the server compresses its response (gzip); disable"),
        ("endless", "SSE stream ended without a response"),  # the package mcp does not report the cause
        ("document", "the response has more than 64 MiB"),
    ],
)
def test_a_hostile_response_ends_the_session_with_its_reason(server: HostileServer, path: str, reason: str) -> None:
    name, text = run_client("fail_to_describe", url=f"http://127.0.0.1:{server.server_port}/{path}")
    assert name == "Fault"
    assert reason in text
    assert server.num_internal == 0
    assert server.sent_bytes < 4 * (64 << 20)
